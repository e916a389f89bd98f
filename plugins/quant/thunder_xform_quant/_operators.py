"""Operators on packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import thunder_xform as tx
from thunder_xform_quant._weight import QuantizedWeight


def _linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    bias: torch.Tensor | None,
    weight: QuantizedWeight,
    *others: torch.Tensor,
) -> torch.Tensor:
    dtype = weight.compute_dtype or x.dtype
    bias = None if bias is None else bias.to(dtype)
    return weight.scheme.linear(x.to(dtype), weight.join(codes, *others), weight.shape, bias).to(x.dtype)


def _input_gradient(
    gradient: torch.Tensor, codes: torch.Tensor, weight: QuantizedWeight, *others: torch.Tensor
) -> torch.Tensor:
    packed = weight.join(codes, *others)
    dtype = weight.compute_dtype or gradient.dtype
    return weight.scheme.input_gradient(gradient.to(dtype), packed, weight.shape).to(gradient.dtype)


def _linear_meta(x: Any, codes: Any, bias: Any, weight: QuantizedWeight, *others: Any) -> Any:
    shape = (*x.shape[:-1], weight.shape[0])
    trained = x.requires_grad or (bias is not None and bias.requires_grad)
    return tx.tensor_like(x, shape=shape, requires_grad=trained)


def _linear_backward(inputs: tuple[Any, ...], outputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> Sequence[Any]:
    _, codes, bias, weight, *others = inputs
    (gradient,) = gradients
    of_bias = None
    if bias is not None:
        batch = list(range(gradient.ndim - 1))
        of_bias = tx.ops.to(tx.ops.sum(gradient, batch) if batch else gradient, bias.dtype)
    return [input_gradient(gradient, codes, weight, *others), None, of_bias, None, *(None for _ in others)]


#: ``dequantize(weight, *tensors) -> weight``, for what is no linear layer.
dequantize = tx.operator(
    "quant_dequantize",
    meta=lambda weight, codes, *others: tx.tensor_like(
        codes, shape=weight.shape, dtype=weight.dtype, requires_grad=False
    ),
    fn=lambda weight, *tensors: weight.dequantize(*tensors),
    backward=lambda inputs, outputs, gradients: [None] * len(inputs),
)

#: ``linear(x, codes, bias, weight, *others) -> y`` in the dtype of ``x``.
linear = tx.operator(
    "quant_linear", meta=_linear_meta, fn=_linear, backward=_linear_backward, linear_weight=1, linear_bias=2
)

#: ``input_gradient(gradient of y, codes, weight, *others) -> gradient of x``
input_gradient = tx.operator(
    "quant_input_gradient",
    meta=lambda gradient, codes, weight, *others: tx.tensor_like(
        gradient, shape=(*gradient.shape[:-1], weight.shape[1])
    ),
    fn=_input_gradient,
)
