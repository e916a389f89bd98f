"""Adapters merged into the weights that the compiled model reads, and taken out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import thunder_xform as tx
from thunder_xform_lora._target import Target, tied_elsewhere


def merge(targets: Sequence[tuple[Target, float]], params: tx.Parameters, ctx: tx.Context) -> dict[str, torch.Tensor]:
    """Replace the targets' weights by merged copies.

    Args:
        targets: those of the active adapters, each with the weight of its adapter.
        params: the model's parameters, as the plugin got them to change.
        ctx: of the plugin.

    Returns:
        The weights before, by name, for :func:`unmerge`.

    Raises:
        PipelineError: a weight cannot take its adapter; nothing is changed then.
    """
    for target, _ in targets:
        _check(target, params, ctx)
    merged: dict[str, torch.Tensor] = {}
    for target, factor in targets:
        value = merged.get(target.weight, params.tensor(target.weight)).detach()
        tensors = [params.tensor(name).detach() for name in target.names]
        merged[target.weight] = merged_weight(target, value, tensors, factor)
    before = {name: params.tensor(name) for name in merged}
    for name, value in merged.items():
        params.replace(name, value, requires_grad=False)
    return before


def unmerge(before: Mapping[str, torch.Tensor], params: tx.Parameters) -> None:
    """Put the weights back that :func:`merge` replaced."""
    for name, value in before.items():
        params.replace(name, value, requires_grad=False)


def merged_weight(target: Target, weight: torch.Tensor, tensors: Sequence[torch.Tensor], factor: float) -> torch.Tensor:
    """A weight that computes the same alone as with its adapter ``factor`` times, in its dtype, rounded once.

    ``tensors`` are A and B, or A, B and magnitudes under DoRA.
    """
    a, b, *magnitude = tensors
    delta = target.layer.change(a, b) * (target.scaling * factor)
    whole = weight.to(delta.dtype) + delta.to(weight.device)
    if magnitude:
        # Constant to gradients, as in DoRA's section 4.3.
        lengths = target.layer.lengths(whole).detach().flatten()
        whole = target.layer.scaled(whole, magnitude[0].flatten() / lengths)
    return whole.to(weight.dtype)


def _check(target: Target, params: tx.Parameters, ctx: tx.Context) -> None:
    reasons = [_unfit(name, params, ctx) for name in (target.weight, *target.names)]
    reasons.append(target.layer.unmergeable or "")
    if tied := tied_elsewhere(target, ctx):
        reasons.append(f"{tied[0]!r} shares the weight without the adapter")
    if params.version(target.weight).requires_grad:
        reasons.append(f"{target.weight!r} trains")
    if reason := next(filter(None, reasons), ""):
        raise tx.errors.PipelineError(
            f"The adapter of {target.modules[0]!r} cannot be merged: {reason}.",
            "Leave adapters separate; handle.state_dict() gives the merged plain model where there is one.",
            name=target.weight,
        )


def _unfit(name: str, params: tx.Parameters, ctx: tx.Context) -> str:
    """Why the stored tensor is not the value of a parameter."""
    version = params.version(name)
    if version.layout != "dense":
        return f"{version.owner!r} stores {name!r} as {version.layout!r}"
    if version.owner != ctx.version(name).owner:
        return f"{version.owner!r} replaced {name!r} after the adapter was added"
    return ""
