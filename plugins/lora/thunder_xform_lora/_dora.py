"""DoRA: an adapter that learns the direction of a weight's rows, and their lengths on their own.

Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", ICML 2024. As in PEFT, gradients do not flow through
the lengths that rows have with the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import thunder_xform as tx
from thunder_xform_lora._layer import Layer
from thunder_xform_lora._target import Target


def lengths(layer: Layer, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Lengths of the rows of a weight with its adapter, in the dtype of A and the shape of PEFT's magnitudes."""
    return layer.lengths(weight.to(a.dtype) + scaling * layer.change(a, b))


#: ``row_lengths(weight, a, b, layer, scaling)``, of shape (out_features,)
_row_lengths = tx.operator(
    "lora_row_lengths",
    meta=lambda weight, a, b, layer, scaling: tx.tensor_like(a, shape=(layer.out_features,), requires_grad=False),
    fn=lambda weight, a, b, layer, scaling: lengths(layer, weight, a, b, scaling).flatten(),
    backward=lambda inputs, outputs, gradients: (None,) * 5,
)


def check(targets: Iterable[Target], params: tx.Parameters, ctx: tx.Context) -> None:
    """Refuse weights whose rows cannot be measured."""
    for target in targets:
        version = params.version(target.weight)
        reason = ""
        if version.layout != "dense" and version.decode is None:
            reason = f"which are stored as {version.layout!r}"
        elif params.tensor(target.weight).is_meta:
            reason = "which is on the meta device and has no data"
        if reason:
            problem = f"`use_dora` needs the rows of {target.modules[0]!r}, {reason}."
            remedy = "Use it where the weights' values are at hand: quantized or not, but loaded."
            raise ctx.option_error("use_dora", True, problem, remedy)


def factor(edit: tx.Edit, target: Target, scaling: float) -> Any:
    """In a trace: by how much the adapter lengthens each output feature, broadcastable to the output."""
    layer, weight = target.layer, edit.parameter(target.weight)
    a, b, magnitude = map(edit.parameter, target.names)
    now = _row_lengths(weight, a, b, layer, scaling)
    return layer.spread(tx.ops.reshape(magnitude, (layer.out_features,)) / now)


def bare(edit: tx.Edit, target: Target, operation: tx.Operation, result: Any, dropped: Any) -> Any:
    """In a trace: what the layer computes without its bias.

    Args:
        edit: gives parameters.
        target: the layer.
        operation: its call.
        result: the output of the call.
        dropped: the input after dropout; None without dropout.
    """
    layer = target.layer
    if dropped is not None:
        return layer.plain(operation, dropped, tx.ops.to(edit.parameter(target.weight), dropped.dtype))
    bias = layer.bias(operation)
    return result if bias is None else result - layer.spread(bias)
