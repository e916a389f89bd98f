"""Splits whose gradient is put together at once, where Thunder pads each part's to the whole and adds them up."""

from __future__ import annotations

from typing import Any

import torch

import thunder_xform as tx

_unbind = tx.operator(
    "aten_unbind",
    meta=lambda x, dim: tuple(tx.tensor_like(x, shape=x.shape[:dim] + x.shape[dim + 1 :]) for _ in range(x.shape[dim])),
    fn=lambda x, dim: tuple(x.unbind(dim)),
    backward=lambda inputs, outputs, gradients: (tx.ops.stack(list(gradients), inputs[1]), None),
)

_split = tx.operator(
    "aten_split",
    meta=lambda x, sizes, dim: tuple(
        tx.tensor_like(x, shape=(*x.shape[:dim], size, *x.shape[dim + 1 :])) for size in sizes
    ),
    fn=lambda x, sizes, dim: torch.split(x, sizes, dim),
    backward=lambda inputs, outputs, gradients: (tx.ops.cat(list(gradients), inputs[2]), None, None),
)


def unbind(operation: tx.Operation) -> Any:
    """The call with the gradients of its outputs stacked."""
    x, dim = operation.args[0], operation.args[1] if len(operation.args) > 1 else 0
    return _unbind(x, dim % x.ndim)


def split(operation: tx.Operation) -> Any:
    """The call with the gradients of its outputs concatenated."""
    x, dim = operation.args[0], operation.args[2] if len(operation.args) > 2 else 0
    dim %= x.ndim
    return _split(x, tuple(part.shape[dim] for part in operation.output), dim)
