"""Layers with sparse gradients, which buckets of dense gradients cannot hold."""

from __future__ import annotations

from typing import Any

import torch
from thunder.core.trace import TraceCtx

from thunder_xform.errors import PipelineError
from thunder_xform.host.dataflow import carrying_gradients
from thunder_xform.host.notes import Notes

_EMBEDDING = "torch.nn.functional.embedding"


def refuse_sparse_operators(computation: TraceCtx, notes: Notes) -> None:
    """Refuse calls of ``torch.nn.functional.embedding`` with ``sparse=True`` on what carries a gradient.

    Raises:
        PipelineError: there is one.
    """
    calls = [b for b in computation.bound_symbols if b.sym.id == _EMBEDDING and _is_sparse(*b.args, **b.kwargs)]
    carrying = carrying_gradients(computation) if calls else set()
    for bsym in calls:
        if bsym.flat_proxy_outs[0].name in carrying:
            found = notes.module(bsym)
            where = f" in module {found[0]!r}" if found and found[0] else ""
            raise PipelineError(
                f"The model calls embedding with sparse=True{where}, whose gradients ranks cannot reduce.",
                "Call it with sparse=False, or on a detached weight.",
                name="embedding",
            )


def _is_sparse(
    a: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: Any = False,
    sparse: Any = False,
) -> bool:
    return bool(sparse)


def refuse_sparse_gradients(model: torch.nn.Module) -> None:
    """Refuse trainable embeddings with ``sparse=True``.

    Raises:
        PipelineError: there is one.
    """
    for name, module in model.named_modules():
        embeds = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if embeds and module.sparse and module.weight.requires_grad:
            raise PipelineError(
                f"{name!r} is an {type(module).__name__} with sparse=True, whose gradients ranks cannot reduce.",
                "Make it with sparse=False, or freeze it.",
                name=name,
            )
