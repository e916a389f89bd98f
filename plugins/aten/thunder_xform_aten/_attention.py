"""Attention that never holds a row of scores for every query: PyTorch's flash kernel for CPU.

On other devices Thunder's own executors `sdpa` and `cudnn` call such kernels; their checks leave out CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import thunder_xform as tx
from thunder_xform_aten._dtypes import at_least_float32, is_floating

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention(operation: tx.Operation) -> Any:
    """The call on PyTorch's kernel, or None for one that PyTorch itself would not run there, or of another device.

    Source of the conditions: PyTorch's ``aten/src/ATen/native/transformers/sdp_utils_cpp.cpp``.
    """
    query, key, value, mask, dropout, causal = operation.args
    dtype = operation.output.dtype
    if not (
        query.device.type == "cpu"
        and str(dtype).rpartition(".")[2] in _DTYPES
        and dropout == 0
        and query.ndim == key.ndim == value.ndim == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.shape[3] == key.shape[3] == value.shape[3]
        and key.shape[2] == value.shape[2]
        and all([*query.shape, *key.shape])
        and (mask is None or _takes(mask, (*query.shape[:3], key.shape[2])))
    ):
        return None
    # Under autocast Thunder casts within the call.
    query, key, value = (tx.ops.to(x, dtype) for x in (query, key, value))
    return _attention(query, key, value, mask, causal, operation.kwargs.get("scale"))[0]


def _takes(mask: Any, scores: tuple[int, ...]) -> bool:
    """Whether the kernel takes a mask for scores (batch, heads, queries, keys)."""
    full = scores if mask.ndim == 4 else scores[2:]
    return mask.ndim == len(full) and all(a in (1, b) for a, b in zip(mask.shape, full, strict=True))


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as the kernel wants it: what is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor with contiguous rows, which the kernel reads."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    added = _additive(mask, query.dtype)
    out, logsumexp = _forward(_rows(query), _rows(key), _rows(value), 0.0, causal, attn_mask=added, scale=scale)
    return out, logsumexp


def _run_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    gradients: tuple[torch.Tensor, ...] = _backward(
        _rows(gradient),
        _rows(query),
        _rows(key),
        _rows(value),
        out,
        logsumexp,
        0.0,
        causal,
        attn_mask=_additive(mask, query.dtype),
        scale=scale,
    )
    return gradients


def _meta(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float | None) -> tuple[Any, Any]:
    logsumexp = tx.tensor_like(query, shape=query.shape[:3], dtype=at_least_float32(query), requires_grad=False)
    return tx.tensor_like(query), logsumexp


def _run_mask_gradient(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    # The gradient of softmax, row by row; the kernel does not give it.
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query * scale, key.mT) + mask
    weights = scores.to(logsumexp.dtype).sub_(logsumexp.unsqueeze(-1)).exp_()
    of_weights = torch.matmul(gradient, value.mT).sub_((gradient * out).sum(-1, keepdim=True))
    return weights.mul_(of_weights).sum_to_size(mask.shape).to(mask.dtype)


def _gradients(inputs: tuple[Any, ...], outputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> Sequence[Any]:
    query, key, value, mask, causal, scale = inputs
    saved = (gradients[0], query, key, value, mask, *outputs)
    # Thunder drops the mask's if nothing reads it.
    of_mask = _mask_gradient(*saved, scale) if mask is not None and is_floating(mask) else None
    return (*_attention_backward(*saved, causal, scale), of_mask, None, None)


_mask_gradient = tx.operator(
    "aten_attention_mask_gradient",
    meta=lambda gradient, query, key, value, mask, *others: tx.tensor_like(mask),
    fn=_run_mask_gradient,
)
_attention_backward = tx.operator(
    "aten_attention_backward",
    meta=lambda gradient, query, key, value, *others: tuple(tx.tensor_like(x) for x in (query, key, value)),
    fn=_run_backward,
)

#: ``_attention(query, key, value, mask, causal, scale) -> (output, log of the sum of exponentials of scores)``
_attention = tx.operator("aten_attention", meta=_meta, fn=_run, backward=_gradients)
