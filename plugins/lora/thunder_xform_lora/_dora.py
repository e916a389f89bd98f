"""DoRA: an adapter that learns the direction of a weight's rows, and their lengths on their own.

Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", ICML 2024. As in PEFT, gradients do not flow through
the lengths that rows have with the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

import thunder_xform as tx
from thunder_xform_lora import _adapter
from thunder_xform_lora._patterns import error
from thunder_xform_lora._targets import Target


def row_norms(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Lengths of the rows of ``weight + scaling * B @ A``, of shape (out_features,), in the dtype of A."""
    norms: torch.Tensor = torch.linalg.norm(weight.to(a.dtype) + scaling * (b @ a), dim=1)
    return norms


_row_norms = tx.operator(
    "lora_row_norms",
    meta=lambda weight, a, b, scaling: tx.tensor_like(a, shape=(weight.shape[0],), requires_grad=False),
    fn=row_norms,
    backward=lambda inputs, outputs, gradients: (None,) * 4,
)


def check(targets: Iterable[Target], params: tx.Parameters, ctx: tx.Context) -> None:
    """Refuse weights whose rows cannot be measured."""
    for target in targets:
        version = params.version(target.weight)
        if version.layout != "dense":
            problem = f"`use_dora` needs the rows of {target.modules[0]!r}, which are stored as {version.layout!r}."
            raise error(ctx, "use_dora", True, problem, "Use it without quantization.")
        if params.tensor(target.weight).is_meta:
            problem = (
                f"`use_dora` needs the rows of {target.modules[0]!r}, which is on the meta device and has no data."
            )
            raise error(ctx, "use_dora", True, problem, "Load the model's weights first.")


def add_magnitudes(targets: Iterable[Target], adapter: str, params: tx.Parameters) -> None:
    """Add the lengths of rows, as they are with the new adapter."""
    for target in targets:
        a, b = (params.tensor(name).detach() for name in _adapter.names(target, adapter))
        norms = row_norms(params.tensor(target.weight).detach(), a, b, target.scaling)
        first, *others = (_adapter.magnitude_name(module, adapter) for module in target.modules)
        params.add(first, norms, aliases=others)


def apply(
    operation: tx.Operation, edit: tx.Edit, names: Sequence[str], scaling: float, dropped: Any, delta: Any, result: Any
) -> Any:
    """What a linear layer computes with its adapter.

    Args:
        operation: the layer's call.
        edit: gives parameters.
        names: of A, B and the lengths of rows.
        scaling: factor of the adapter's output.
        dropped: the adapter's input after dropout; None without dropout.
        delta: the scaled output of the adapter, of shape (..., out_features).
        result: the output of the layer.
    """
    weight = edit.parameter(str(operation.linear_weight))
    a, b, magnitude = map(edit.parameter, names)
    factor = magnitude / _row_norms(weight, a, b, scaling)
    if dropped is None and operation.name == "linear":
        bias = operation.args[2]
        base = result if bias is None else result - bias
    else:
        x = tx.ops.to(operation.args[0], a.dtype) if dropped is None else dropped
        base = tx.ops.linear(x, tx.ops.to(weight, a.dtype))
    return result + ((factor - 1) * base + factor * delta)


def merged(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The weight that computes the same alone, in its dtype."""
    whole = weight.to(a.dtype) + scaling * (b @ a)
    return (whole * (magnitude / row_norms(weight, a, b, scaling))[:, None]).to(weight.dtype)
