"""Layers with sparse gradients, which buckets of dense gradients cannot hold."""

from __future__ import annotations

import torch

from thunder_xform.errors import PipelineError


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
