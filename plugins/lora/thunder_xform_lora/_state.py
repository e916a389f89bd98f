"""Full states: those of the plain model, with adapters in its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

import thunder_xform as tx
from thunder_xform_lora import _adapter
from thunder_xform_lora._merge import merged_weight
from thunder_xform_lora._pissa import PISSA, decompose
from thunder_xform_lora._targets import Target, tied_elsewhere
from thunder_xform_lora.options import Options


def merge_into(
    state: dict[str, torch.Tensor], targets: Iterable[Target], weights: Mapping[str, float], dora: bool, ctx: tx.Context
) -> None:
    """Put adapters into the weights of a state that holds both.

    Args:
        state: what is stored, by name.
        targets: the weights with adapters.
        weights: of the active adapters, by name.
        dora: whether adapters learn the lengths of rows apart.
        ctx: of the plugin.

    Raises:
        CheckpointError: no plain model computes the same as a layer with its adapter.
    """
    for target in targets if weights else ():
        if reason := _apart(target, ctx):
            path = target.modules[0]
            raise tx.errors.CheckpointError(
                f"With its adapter, {reason}.",
                f"Save kind='adapter', or train without this adapter: exclude_modules=[{path!r}].",
            )
        for adapter, weight in weights.items():
            tensors = [state[name] for name in _adapter.names(target, adapter, dora)]
            state[target.weight] = merged_weight(target, state[target.weight], tensors, weight)


def _apart(target: Target, ctx: tx.Context) -> str:
    """Why the plain model cannot compute what a layer does with its adapter, or nothing."""
    path = target.modules[0]
    if tied := tied_elsewhere(target, ctx):
        return (
            f"{path!r} no longer has the weight that it shares with {tied[0]!r}: the plain model, where they are tied, "
            f"cannot compute the same"
        )
    reason = target.layer.unmergeable
    return f"{path!r} is no plain layer: {reason}" if reason else ""


def add_neutral(
    state: dict[str, torch.Tensor], targets: Iterable[Target], adapter: str, options: Options, ctx: tx.Context
) -> None:
    """Add an adapter that changes nothing to the weights that a state of the plain model holds.

    For "pissa", the weights become what an adapter of their principal part leaves.
    """
    for target in targets:
        if target.weight not in state:
            continue
        names, weight = _adapter.names(target, adapter), state[target.weight]
        version = ctx.version(names[0])
        if options.use_dora:
            lengths = target.layer.lengths(weight.to(version.device, version.dtype))
            state[_adapter.magnitude_name(target.modules[0], adapter)] = lengths
        if options.init_lora_weights == PISSA and target.layer.linear:
            *tensors, state[target.weight] = decompose(target, weight.to(version.device))
            state |= zip(names, tensors, strict=True)
        else:
            name = names[target.layer.starts_zero]
            version = ctx.version(name)
            state[name] = torch.zeros(version.shape, dtype=version.dtype, device=version.device)
