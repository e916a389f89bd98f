"""Optimizers built from the plain model, which training the compiled one would leave without gradients."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import gt

import torch

from thunder_xform.errors import PipelineError, spell
from thunder_xform.host.ledger import Ledger

_SHOWN = 3


class OptimizerCheck:
    """Looks for an optimizer that was built from the plain model instead of the compiled one.

    Created when all plugins are done. It hangs on the live parameters until the first gradient; from then on,
    :meth:`look_again` notices on each call of the model when something new holds parameters of the plain one.

    Args:
        ledger: which of the user's parameters were replaced by others.
        live: gives the compiled model's parameters by name.
    """

    def __init__(self, ledger: Ledger, live: Callable[[], Mapping[str, torch.nn.Parameter]]) -> None:
        self._live = live
        self._plain = frozenset(name for name in ledger if ledger.original(name) is not None)
        self._replaced = {
            name: weakref.ref(original)
            for name in ledger
            if (original := ledger.original(name)) is not None
            and isinstance(original, torch.nn.Parameter)
            and original is not ledger.tensor(name)
        }
        trained = [p for p in live().values() if p.requires_grad] if self._replaced else []
        # The garbage collector does not see through a tensor's hooks: a model that they held would never be freed.
        self_ = weakref.ref(self)

        def at_gradient(parameter: torch.Tensor) -> None:
            if (check := self_()) is not None:
                check._at_gradient()

        self._ledger = ledger
        self._held: list[torch.Tensor] = []
        self._references: list[int] = []
        self._hooks = [p.register_post_accumulate_grad_hook(at_gradient) for p in trained]

    def _at_gradient(self) -> None:
        self.run()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # The user's module may have others by now: what was released is on the meta device.
        now = {name: self._ledger.original(name) for name in self._replaced}
        self._held = [p for p in now.values() if p is not None]
        self._replaced.update((name, weakref.ref(p)) for name, p in now.items() if isinstance(p, torch.nn.Parameter))
        self._references = [*map(sys.getrefcount, self._held)]

    def look_again(self) -> None:
        """:meth:`run` if, after the first gradient, more references to parameters of the plain model exist than before.

        Counting them costs nothing next to a call; looking for what holds them takes tens of milliseconds.
        """
        references = [*map(sys.getrefcount, self._held)]
        if references == self._references:
            return
        more = any(map(gt, references, self._references))
        self._references = references
        if more:
            try:
                self.run()
            except PipelineError:
                self._references = [0] * len(references)
                raise

    def run(self) -> None:
        """Look at all optimizers that exist.

        Raises:
            PipelineError: one holds parameters that the compiled model replaced, and none holds any that it trains.
        """
        if self._mistaken() is None:
            return
        gc.collect()  # An optimizer that nobody uses any more may still be waiting for this.
        mistaken = self._mistaken()
        if mistaken is None:
            return
        optimizer, names = mistaken
        more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        raise PipelineError(
            f"{optimizer} holds parameters of the plain model ({spell([*map(repr, names[:_SHOWN]), *more])}), but the "
            f"compiled model trains others in their place, and no optimizer holds any of those.",
            f"Build the optimizer from what thunder.jit returned: {optimizer}(model.parameters(), ...).",
            optimizer=optimizer,
            names=names,
        )

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer holds parameters of the compiled model or of the plain one."""
        replaced = {id(p) for ref in self._replaced.values() if (p := ref()) is not None}
        live = {id(p) for p in self._live().values()}
        return not (replaced | live).isdisjoint(_held(optimizer))

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer that was built from the plain model train the compiled one.

        In each group, the plain model's parameters give way to those that the compiled model trains in their place;
        frozen ones go. Parameters of other models stay.

        Raises:
            PipelineError: the optimizer has taken steps already, or plugins added parameters that it cannot know of.
                Nothing is changed then.
        """
        live = self._live()
        names = {id(p): name for name, ref in self._replaced.items() if (p := ref()) is not None}
        held = set(_held(optimizer))
        if held.isdisjoint(names):
            return
        kind = type(optimizer).__name__
        if optimizer.state:
            raise PipelineError(
                f"{kind} was built from the plain model and has taken steps already.",
                "Build a new optimizer from the parameters of the transformed model.",
            )
        added = [n for n, p in live.items() if p.requires_grad and n not in self._plain and id(p) not in held]
        if added:
            more = [f"{len(added) - _SHOWN} more"] if len(added) > _SHOWN else []
            raise PipelineError(
                f"{kind} was built from the plain model, which lacks {spell([*map(repr, added[:_SHOWN]), *more])}.",
                "Build it from the parameters of the transformed model.",
                names=tuple(added),
            )
        for group in optimizer.param_groups:
            found = [(p, live[names[id(p)]] if id(p) in names else p) for p in group["params"]]
            group["params"] = [new for old, new in found if new is old or new.requires_grad]

    def _mistaken(self) -> tuple[str, tuple[str, ...]] | None:
        """Class of an optimizer of the plain model and the names it holds; None if nothing is wrong."""
        replaced = {id(p): name for name, ref in self._replaced.items() if (p := ref()) is not None}
        trained = {id(p) for p in self._live().values() if p.requires_grad}
        found: tuple[str, tuple[str, ...]] | None = None
        for optimizer in _optimizers():
            held = _held(optimizer)
            if not trained.isdisjoint(held):
                return None
            names = tuple(replaced[key] for key in held if key in replaced)
            if names:
                found = type(optimizer).__name__, names
        return found


def _optimizers() -> Iterable[torch.optim.Optimizer]:
    # By type alone: any other question to an arbitrary object may run its code.
    return [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]


def _held(optimizer: torch.optim.Optimizer) -> list[int]:
    """Identities of the parameters of an optimizer; wrappers that forward to another hold none themselves."""
    groups = vars(optimizer).get("param_groups", ())
    return [id(parameter) for group in groups for parameter in group["params"]]
