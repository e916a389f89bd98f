"""The ``lora`` plugin: hooks that add adapters, apply them, and carry them through checkpoints."""

from __future__ import annotations

import torch

import thunder_xform as tx
from thunder_xform_lora import _adapter
from thunder_xform_lora._rewrite import applied_weights, apply_adapters
from thunder_xform_lora._targets import Target, find_targets, tied_elsewhere
from thunder_xform_lora.options import Options


class LoRA(tx.Plugin[Options]):
    """Low-rank adapters on linear layers. All of the model's own parameters are frozen in the compiled model.

    Adapters are initialized from torch's random state; plugins that distribute the model make them the same
    on all ranks.
    """

    _targets: tuple[Target, ...]
    #: modules whose mode decides whether dropout is on, by target weight; empty without dropout
    _modes: dict[str, torch.nn.Module]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the layers with adapters, in module order but for tied ones."""
        return tuple(path for target in self._targets for path in target.modules)

    def file_keys(self, adapter: str) -> dict[str, str]:
        """Names of an adapter's tensors by what PEFT calls them in files, relative to the model.

        Raises:
            CheckpointError: there is no such adapter.
        """
        if adapter != _adapter.DEFAULT:
            raise tx.errors.CheckpointError(
                f"The model has no adapter {adapter!r}.", f"It has {_adapter.DEFAULT!r}.", adapter=adapter
            )
        return {k: name for target in self._targets for k, name in _adapter.file_keys(target, adapter).items()}

    @tx.hookimpl
    def update_model_state(self, params: tx.Parameters, ctx: tx.Context) -> None:
        self._targets = find_targets(self.options, params, ctx)
        dropped = self._targets if self.options.lora_dropout else ()
        self._modes = {target.weight: ctx.module.get_submodule(target.modules[0]) for target in dropped}
        for name in params:
            if params.version(name).origin == "model":
                params.set_requires_grad(name, False)
        _adapter.add(self._targets, params)

    @tx.hookimpl
    def guard_key(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self._modes.values()])

    @tx.hookimpl
    def before_autograd(self, computation: tx.Computation, ctx: tx.Context) -> tx.Computation:
        self._check_reachable(computation, ctx)
        return apply_adapters(computation, self._targets, self._dropout)

    def _dropout(self, target: Target) -> float:
        module = self._modes.get(target.weight)
        return self.options.lora_dropout if module is not None and module.training else 0.0

    def _check_reachable(self, computation: tx.Computation, ctx: tx.Context) -> None:
        """Refuse a model that uses a target's weight only in ways that an adapter cannot follow."""
        applied, read = applied_weights(computation), frozenset(computation.parameters)
        for target in self._targets:
            if target.weight in read - applied and not tied_elsewhere(target, ctx):
                path = target.modules[0]
                raise tx.errors.PipelineError(
                    f"The model uses the weight of {path!r} in other operations than "
                    f"torch.nn.functional.linear, so its adapter would have no effect.",
                    f"Call the layer, or exclude it with exclude_modules=[{path!r}].",
                )

    @tx.hookimpl
    def export_state(self, state: dict[str, torch.Tensor], ctx: tx.Context) -> dict[str, torch.Tensor] | None:
        """Full: adapters merged into the weights. Otherwise as they are."""
        if ctx.state_kind != "full":
            return None
        state = dict(state)
        for target in self._targets:
            if tied := tied_elsewhere(target, ctx):
                path = target.modules[0]
                raise tx.errors.CheckpointError(
                    f"With its adapter, {path!r} no longer has the weight that it shares with {tied[0]!r}: "
                    f"the plain model, where they are tied, cannot compute the same.",
                    f"Save kind='adapter', or train without this adapter: exclude_modules=[{path!r}].",
                )
            a, b = map(state.pop, _adapter.names(target))
            state[target.weight] = _adapter.merged(state[target.weight], a, b, target.scaling)
        return state

    @tx.hookimpl
    def import_state(self, state: dict[str, torch.Tensor], ctx: tx.Context) -> dict[str, torch.Tensor] | None:
        """Full: the weights as given, and adapters that add nothing to them. Otherwise as they are."""
        if ctx.state_kind != "full":
            return None
        state = dict(state)
        for target in self._targets:
            if target.weight in state:
                name = _adapter.names(target)[1]
                version = ctx.version(name)
                state[name] = torch.zeros(version.shape, dtype=version.dtype, device=version.device)
        return state
