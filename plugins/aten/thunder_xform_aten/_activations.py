"""Activations that keep one tensor for the backward: `relu` its output, which the next layer keeps anyway."""

from __future__ import annotations

from typing import Any

import torch

import thunder_xform as tx
from thunder_xform_aten._dtypes import is_floating

_aten = torch.ops.aten


def _like(x: Any, *others: Any) -> Any:
    return tx.tensor_like(x)


_relu_backward = tx.operator(
    "aten_relu_backward", meta=_like, fn=lambda gradient, out: _aten.threshold_backward(gradient, out, 0)
)
_relu = tx.operator(
    "aten_relu",
    meta=_like,
    fn=torch.relu,
    backward=lambda inputs, outputs, gradients: (_relu_backward(*gradients, *outputs),),
)

_gelu_backward = tx.operator(
    "aten_gelu_backward",
    meta=_like,
    fn=lambda gradient, x, approximate: _aten.gelu_backward(gradient, x, approximate=approximate),
)
_gelu = tx.operator(
    "aten_gelu",
    meta=_like,
    fn=lambda x, approximate: torch.nn.functional.gelu(x, approximate=approximate),
    backward=lambda inputs, outputs, gradients: (_gelu_backward(*gradients, *inputs), None),
)

_silu_backward = tx.operator("aten_silu_backward", meta=_like, fn=_aten.silu_backward)
_silu = tx.operator(
    "aten_silu",
    meta=_like,
    fn=torch.nn.functional.silu,
    backward=lambda inputs, outputs, gradients: (_silu_backward(*gradients, *inputs),),
)


def relu(operation: tx.Operation) -> Any:
    """The call on PyTorch's kernel, or None if it changes its input or is of integers."""
    return _relu(operation.args[0]) if _plain(operation) else None


def gelu(operation: tx.Operation) -> Any:
    """The call on PyTorch's kernel."""
    return _gelu(operation.args[0], operation.kwargs.get("approximate", "none")) if _plain(operation) else None


def silu(operation: tx.Operation) -> Any:
    """The call on PyTorch's kernel, or None if it changes its input."""
    return _silu(operation.args[0]) if _plain(operation) else None


def _plain(operation: tx.Operation) -> bool:
    x, *inplace = operation.args
    return x.dtype == operation.output.dtype and is_floating(x) and not any(inplace)
