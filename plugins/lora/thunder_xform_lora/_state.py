"""Full states: those of the plain model, with adapters in its weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import thunder_xform as tx
from thunder_xform_lora._merge import merged_weight
from thunder_xform_lora._pissa import decompose
from thunder_xform_lora._target import Target, tied_elsewhere


def merge_into(state: dict[str, torch.Tensor], targets: Iterable[tuple[Target, float]], ctx: tx.Context) -> None:
    """Put adapters into the weights of a state that holds both.

    Args:
        state: what is stored, by name.
        targets: those of the active adapters, each with the weight of its adapter.
        ctx: of the plugin.

    Raises:
        CheckpointError: no plain model computes the same as a layer with its adapter.
    """
    for target, factor in targets:
        if reason := _apart(target, ctx):
            path = target.modules[0]
            raise tx.errors.CheckpointError(
                f"With its adapter, {reason}.",
                f"Save kind='adapter', or train without this adapter: exclude_modules=[{path!r}].",
            )
        state[target.weight] = merged_weight(
            target, state[target.weight], [state[name] for name in target.names], factor
        )


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


def add_neutral(state: dict[str, torch.Tensor], target: Target, ctx: tx.Context) -> None:
    """Add tensors with which an adapter changes nothing to a state of the plain model.

    Under "pissa", the weight becomes what an adapter of its principal part leaves.
    """
    if target.weight not in state:
        return
    weight, (a, b, *magnitude) = state[target.weight], target.names
    version = ctx.version(a)
    for name in magnitude:
        state[name] = target.layer.lengths(weight.to(version.device, version.dtype))
    if target.decomposed:
        state[a], state[b], state[target.weight] = decompose(target, weight.to(version.device))
    else:
        zero = ctx.version(target.names[target.layer.starts_zero])
        state[zero.name] = torch.zeros(zero.shape, dtype=zero.dtype, device=zero.device)
