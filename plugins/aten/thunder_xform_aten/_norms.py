"""Norms that keep their input and one or two numbers a row for the backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import thunder_xform as tx
from thunder_xform_aten._dtypes import at_least_float32, is_floating

_aten = torch.ops.aten


def layer_norm(operation: tx.Operation) -> Any:
    """The call on PyTorch's kernel, or None if its tensors have several dtypes, or for a bias without weight."""
    x, shape, weight, bias, eps = operation.args
    if not _uniform(operation, x, weight, bias) or (weight is None and bias is not None):
        return None
    return _layer_norm(x, tuple(shape), weight, bias, eps)[0]


def rms_norm(operation: tx.Operation) -> Any:
    """The call in as few passes as PyTorch's operators allow, or None if its tensors have several dtypes."""
    x, shape, weight, eps = operation.args
    if not _uniform(operation, x, weight):
        return None
    return _rms_norm(x, tuple(shape), weight, eps)[0]


def _uniform(operation: tx.Operation, x: Any, *others: Any) -> bool:
    dtypes = {x.dtype, operation.output.dtype, *(other.dtype for other in others if other is not None)}
    return len(dtypes) == 1 and is_floating(x) and math.prod(x.shape) > 0


def _stated(x: Any, normalized: Sequence[int], dtype: Any) -> Any:
    """A proxy for what is kept of each row of ``x``."""
    rows = (*x.shape[: x.ndim - len(normalized)], *(1 for _ in normalized))
    return tx.tensor_like(x, shape=rows, dtype=dtype, requires_grad=False)


def _layer_norm_meta(x: Any, normalized: tuple[int, ...], weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    dtype = x.dtype if x.device.type == "cpu" else at_least_float32(x)
    return tx.tensor_like(x), _stated(x, normalized, dtype), _stated(x, normalized, dtype)


def _layer_norm_gradients(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], gradients: tuple[Any, ...]
) -> Sequence[Any]:
    x, normalized, weight, bias, _ = inputs
    saved = (gradients[0], x, normalized, *outputs[1:])
    of_weight, of_bias = None, None
    if bias is not None:
        of_weight, of_bias = _layer_norm_affine_gradients(*saved, weight, bias)
    elif weight is not None:
        of_weight = _layer_norm_weight_gradient(*saved, weight)
    return _layer_norm_input_gradient(*saved, weight), None, of_weight, of_bias, None


# Thunder drops gradients that nothing reads, so each that can be due without the others is an operator of its own.
_layer_norm_input_gradient = tx.operator(
    "aten_layer_norm_input_gradient",
    meta=lambda gradient, x, *others: tx.tensor_like(x),
    fn=lambda gradient, x, normalized, mean, rstd, weight: _aten.native_layer_norm_backward(
        gradient, x, normalized, mean, rstd, weight, None, (True, False, False)
    )[0],
)
_layer_norm_weight_gradient = tx.operator(
    "aten_layer_norm_weight_gradient",
    meta=lambda gradient, x, normalized, mean, rstd, weight: tx.tensor_like(weight),
    fn=lambda gradient, x, normalized, mean, rstd, weight: _aten.native_layer_norm_backward(
        gradient, x, normalized, mean, rstd, weight, None, (False, True, False)
    )[1],
)
_layer_norm_affine_gradients = tx.operator(
    "aten_layer_norm_affine_gradients",
    meta=lambda gradient, x, normalized, mean, rstd, weight, bias: (tx.tensor_like(weight), tx.tensor_like(bias)),
    fn=lambda gradient, x, normalized, mean, rstd, weight, bias: _aten.native_layer_norm_backward(
        gradient, x, normalized, mean, rstd, weight, bias, (False, True, True)
    )[1:],
)

#: ``_layer_norm(x, normalized_shape, weight, bias, eps) -> (y, mean, 1 / standard deviation)``
_layer_norm = tx.operator(
    "aten_layer_norm", meta=_layer_norm_meta, fn=_aten.native_layer_norm, backward=_layer_norm_gradients
)


def _exact(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype to compute in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _run_rms_norm(
    x: torch.Tensor, normalized: tuple[int, ...], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    exact, dims = _exact(x), tuple(range(-len(normalized), 0))
    eps = torch.finfo(exact.dtype).eps if eps is None else eps
    norm = torch.linalg.vector_norm(exact, dim=dims, keepdim=True)
    rstd = norm.square_().div_(math.prod(normalized)).add_(eps).rsqrt_()
    out = exact * rstd
    return (out if weight is None else out.mul_(weight)).to(x.dtype), rstd


def _run_input_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    normalized: tuple[int, ...],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    # y = x * rstd * weight; with g = dy * weight: dx = rstd * (g - x * rstd**2 * mean(g * x)).
    exact, dims = _exact(x), tuple(range(-len(normalized), 0))
    g = _exact(gradient).clone() if weight is None else _exact(gradient) * weight
    mean = (g * exact).sum(dims, keepdim=True).mul_(rstd.square()).div_(-math.prod(normalized))
    return g.addcmul_(exact, mean).mul_(rstd).to(x.dtype)


def _run_weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, normalized: tuple[int, ...], rstd: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    rows = (_exact(gradient) * _exact(x)).reshape(-1, math.prod(normalized))
    return (rstd.reshape(1, -1) @ rows).reshape(normalized).to(weight.dtype)


_input_gradient = tx.operator(
    "aten_rms_norm_input_gradient", meta=lambda gradient, x, *others: tx.tensor_like(x), fn=_run_input_gradient
)
_weight_gradient = tx.operator(
    "aten_rms_norm_weight_gradient",
    meta=lambda gradient, x, normalized, rstd, weight: tx.tensor_like(weight),
    fn=_run_weight_gradient,
)


def _rms_norm_gradients(inputs: tuple[Any, ...], outputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> Sequence[Any]:
    x, normalized, weight, _ = inputs
    saved = (gradients[0], x, normalized, outputs[1], weight)
    return _input_gradient(*saved), None, None if weight is None else _weight_gradient(*saved), None


#: ``_rms_norm(x, normalized_shape, weight, eps) -> (y, 1 / root mean square)``
_rms_norm = tx.operator(
    "aten_rms_norm",
    meta=lambda x, normalized, weight, eps: (tx.tensor_like(x), _stated(x, normalized, at_least_float32(x))),
    fn=_run_rms_norm,
    backward=_rms_norm_gradients,
)
