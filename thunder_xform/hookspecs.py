"""The contract with plugin authors: the hooks a plugin implements.

Implement any of them as methods of the plugin class and mark each with :data:`thunder_xform.hookimpl`. pluggy lets an
implementation take fewer arguments than listed here. Observers (profilers, dumpers) implement the same hooks as
wrappers, ``@hookimpl(wrapper=True)``, and see the calls of every plugin; ``ctx.plugin`` says whose call it is.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch

    from thunder_xform.context import Context
    from thunder_xform.host.computation import Computation
    from thunder_xform.host.parameters import Parameters
    from thunder_xform.host.prologue import Prologue
    from thunder_xform.host.schedule import Schedule

PROJECT = "thunder_xform"

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a method as the implementation of the hook of the same name.
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """All hooks, in the order in which they first run."""

    @hookspec(firstresult=True)
    def update_model_state(self, params: Parameters, ctx: Context) -> None:
        """Add, replace, shard or freeze parameters and buffers.

        Runs once, at ``thunder.jit``. Check everything that can be wrong before the first change: what fails here on
        one rank is reported on all, but a collective already under way cannot be taken back.
        """

    @hookspec(firstresult=True)
    def guard_key(self, ctx: Context) -> Hashable:
        """A value under which compiled code is valid.

        Runs on every call of the model, before anything else, so it must cost no more than reading a few attributes.
        Each distinct value is compiled once; coming back to an earlier one is a cache hit.
        """

    @hookspec(firstresult=True)
    def mutate_prologue(self, prologue: Prologue, ctx: Context) -> Prologue | None:
        """Add checks beyond those derived from the ledger. Runs in each compilation."""

    @hookspec(firstresult=True)
    def before_autograd(self, computation: Computation, ctx: Context) -> Computation | None:
        """Rewrite operators, insert operators with gradients. Runs in each compilation, before differentiation."""

    @hookspec(firstresult=True)
    def after_optimization(self, schedule: Schedule, ctx: Context) -> Schedule | None:
        """Reorder operators, never values. Runs on the forward and on the backward trace (``schedule.phase``)."""

    @hookspec(firstresult=True)
    def invalidate_cache(self, event: str, ctx: Context) -> None:
        """Drop derived state: all compiled entries are about to go, because of ``event``."""

    @hookspec(firstresult=True)
    def sync_gradients(self, ctx: Context) -> None:
        """Reduce gradients that were accumulated locally, for loops that end inside ``no_sync``."""

    @hookspec(firstresult=True)
    def discard_gradients(self, ctx: Context) -> None:
        """Forget gradients that were accumulated locally outside of ``.grad``: ``model.zero_grad()`` was called."""

    @hookspec(firstresult=True)
    def export_state(self, state: dict[str, torch.Tensor], ctx: Context) -> dict[str, torch.Tensor] | None:
        """Map names and values towards the plain model's, for ``ctx.state_kind``.

        Plugins that change the layout of parameters come first, so that the others meet dense tensors as the model's
        operators see them; each of the two in reverse pipeline order.
        """

    @hookspec(firstresult=True)
    def import_state(self, state: dict[str, torch.Tensor], ctx: Context) -> dict[str, torch.Tensor] | None:
        """Map names and values from the plain model's. Runs in the reverse of the order of ``export_state``."""

    @hookspec(firstresult=True)
    def gradient_norm(self, parameters: list[torch.nn.Parameter], norm_type: float, ctx: Context) -> Any:
        """The norm of the gradients of ``parameters`` over all ranks, from a plugin that declared no placements.

        Returns the scalar tensor, or None if the plugin leaves gradients whole on every rank. Where parameters were
        cut with ``params.replace(..., mesh=, placement=)`` the norm follows from that, and this is not called.
        Clipping is refused where a plugin stores parameters that train in another form and does neither.
        """
