"""The ``lora`` plugin: hooks that add adapters, apply them, and carry them through checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

import thunder_xform as tx
from thunder_xform_lora._adapter import Adapter, add_tensors, find_adapters
from thunder_xform_lora._merge import merge, unmerge
from thunder_xform_lora._rewrite import applied_weights, apply_adapters
from thunder_xform_lora._selection import Selection
from thunder_xform_lora._state import add_neutral, merge_into
from thunder_xform_lora._target import Target, tied_elsewhere
from thunder_xform_lora._trained import Trained, add_copies, export_copies, read_copies
from thunder_xform_lora.options import Options


class LoRA(tx.Plugin[Options]):
    """Low-rank adapters. All of the model's own parameters are frozen in the compiled model.

    Adapters are initialized from torch's random state; plugins that distribute the model make them the same
    on all ranks.
    """

    _adapters: dict[str, Adapter]
    _selection: Selection
    #: modules whose mode decides whether dropout is on, by their names; empty without dropout
    _modes: dict[str, torch.nn.Module]
    #: what `merge` changes parameters through
    _grip: tuple[tx.Parameters, tx.Context]
    #: weights that merged ones stand for, by name
    _unmerged: dict[str, torch.Tensor]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the layers with adapters, in module order but for tied ones; those of several adapters in turn."""
        return tuple(dict.fromkeys(path for adapter in self._adapters.values() for path in adapter.modules))

    def adapter(self, name: str) -> Adapter:
        """The adapter of that name.

        Raises:
            PipelineError: there is no such adapter.
        """
        self._selection.check(name)
        return self._adapters[name]

    @property
    def active_adapters(self) -> Mapping[str, float]:
        """Weights of the adapters that take part, by name."""
        return self._selection.active

    def set_adapter(self, adapters: str | Sequence[str] | Mapping[str, float]) -> None:
        """Let other adapters take part from now on: one, or the sum of several, or a weighted sum.

        Each selection compiles once; coming back to one finds its code. On every rank alike.

        Raises:
            PipelineError: an unknown name, a weight that is no number, several of which only one can be active, or
                adapters are merged.
        """
        self._selection.choose(adapters)

    def disable(self) -> None:
        """Let the model compute what it does without adapters, until :meth:`enable` or :meth:`set_adapter`."""
        self._selection.enable(False)

    def enable(self) -> None:
        """Let the adapters take part that were active before :meth:`disable`."""
        self._selection.enable(True)

    def merge(self) -> None:
        """Add the active adapters to the weights, in copies that the compiled model reads until :meth:`unmerge`.

        One rounding to a weight's dtype an adapter; the model's own weights stay as they are. On every rank alike.

        Raises:
            PipelineError: a weight is quantized, sharded, tied or trains, or adapters are merged already; nothing is
                changed then.
        """
        active = self._selection.active
        if self._selection.merged or not active:
            raise tx.errors.PipelineError(
                f"{'Adapters are merged already' if active else 'All adapters are disabled'}.",
                f"Call {'unmerge' if active else 'enable'}() first.",
            )
        self._unmerged = merge(self._active_targets, *self._grip)
        self._selection.merged = True

    def unmerge(self) -> None:
        """Take the adapters out of the weights again, exactly.

        Raises:
            PipelineError: none are merged.
        """
        if not self._selection.merged:
            raise tx.errors.PipelineError("No adapters are merged.", "Call merge() first.")
        unmerge(self._unmerged, self._grip[0])
        self._unmerged = {}
        self._selection.merged = False

    def base_tensor(self, name: str) -> torch.Tensor | None:
        """The model's own parameter of that name, without adapters; None if it has none."""
        params, _ = self._grip
        return params.original(name) if name in params else None

    @tx.hookimpl
    def update_model_state(self, params: tx.Parameters, ctx: tx.Context) -> None:
        self._grip = params, ctx
        self._adapters = find_adapters(self.options, params, ctx)
        self._selection = Selection({name: adapter.exclusive for name, adapter in self._adapters.items()})
        dropped = [t for t in self._targets if t.layer.drops and t.options.lora_dropout]
        self._modes = {target.modules[0]: ctx.module.get_submodule(target.modules[0]) for target in dropped}
        for name in params:
            if params.version(name).origin == "model":
                params.set_requires_grad(name, False)
        for adapter in self._adapters.values():
            for target in adapter.targets:
                add_tensors(target, params)
            add_copies(adapter.trained, params)

    @property
    def _targets(self) -> list[Target]:
        """Those of all adapters."""
        return [target for adapter in self._adapters.values() for target in adapter.targets]

    @property
    def _active_targets(self) -> list[tuple[Target, float]]:
        """Those of the active adapters, each with the weight of its adapter."""
        active = self._selection.active.items()
        return [(target, weight) for name, weight in active for target in self._adapters[name].targets]

    def _active_trained(self) -> Iterator[Trained]:
        """What trains along with the active adapters."""
        return (each for name in self._selection.active for each in self._adapters[name].trained)

    @tx.hookimpl
    def guard_key(self) -> tuple[object, ...]:
        return (self._selection.key, *[module.training for module in self._modes.values()])

    @tx.hookimpl
    def before_autograd(self, computation: tx.Computation, ctx: tx.Context) -> tx.Computation:
        self._check_reachable(computation, ctx)
        if not self._selection.merged:
            computation = apply_adapters(computation, self._active_targets, self._dropout)
        return read_copies(self._active_trained(), computation)

    def _dropout(self, target: Target) -> float:
        module = self._modes.get(target.modules[0]) if target.layer.drops else None
        return target.options.lora_dropout if module is not None and module.training else 0.0

    def _check_reachable(self, computation: tx.Computation, ctx: tx.Context) -> None:
        """Refuse a model that uses a target's weight only in ways that an adapter cannot follow."""
        applied, read = applied_weights(computation), frozenset(computation.parameters)
        for target in self._targets:
            if target.weight in read and target.key not in applied and not tied_elsewhere(target, ctx):
                path = target.modules[0]
                raise tx.errors.PipelineError(
                    f"The model uses the weight of {path!r} in other operations than "
                    f"{target.layer.function}, so its adapter would have no effect.",
                    f"Call the layer, or exclude it with exclude_modules=[{path!r}].",
                )

    @tx.hookimpl
    def export_state(self, state: dict[str, torch.Tensor], ctx: tx.Context) -> dict[str, torch.Tensor] | None:
        """Full: active adapters merged into the weights. Otherwise as they are."""
        if ctx.state_kind != "full":
            return None
        state = dict(state)
        if not self._selection.merged:
            merge_into(state, self._active_targets, ctx)
        export_copies(self._active_trained(), state)
        own = {name for adapter in self._adapters.values() for name in adapter.file_keys.values()}
        return {name: tensor for name, tensor in state.items() if name not in own}

    @tx.hookimpl
    def import_state(self, state: dict[str, torch.Tensor], ctx: tx.Context) -> dict[str, torch.Tensor] | None:
        """Full: the weights as given, and adapters that change nothing. Otherwise as they are."""
        if self._selection.merged:
            raise tx.errors.CheckpointError(
                "The adapters are merged into the model's weights.", "Call handle.plugin('lora').unmerge() first."
            )
        if ctx.state_kind != "full":
            return None
        state = dict(state)
        for target in self._targets:
            add_neutral(state, target, ctx)
        trained = (each for adapter in self._adapters.values() for each in adapter.trained)
        return state | {each.name: state[each.source] for each in trained if each.source in state}
