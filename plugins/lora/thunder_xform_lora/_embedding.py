"""Adapters of embeddings."""

from __future__ import annotations

from typing import Any

import torch

import thunder_xform as tx
from thunder_xform_lora._layer import Layer
from thunder_xform_lora.options import Options


class Embedding(Layer):
    """``torch.nn.Embedding``: ``y + A.T[ids] @ B.T``, with A (r, num_embeddings) and B (embedding_dim, r).

    As in PEFT, no entry of the input can be dropped, and the column of A at ``padding_idx`` gets no gradient.
    """

    function = "torch.nn.functional.embedding"
    parts = ("lora_embedding_A.{}", "lora_embedding_B.{}")
    starts_zero = 0
    out_dim = 1
    drops = False

    def __init__(self, module: torch.nn.Embedding) -> None:
        shape = module.num_embeddings, module.embedding_dim
        super().__init__(*shape, shape)
        # Thunder has no operator that renormalizes what it reads, gives sparse gradients or scales them by frequency.
        odd = {name: getattr(module, name) for name in ("max_norm", "scale_grad_by_freq", "sparse")}
        self._odd = [f"{name}={value!r}" for name, value in odd.items() if value not in (None, False)]

    @classmethod
    def weight_of(cls, operation: tx.Operation) -> str | None:
        return operation.parameter(1) if operation.name == "embedding" and operation.operator is None else None

    def refusal(self, r: int, options: Options) -> str | None:
        return f"has {self._odd[0]}, which Thunder cannot compile" if self._odd else None

    def shapes(self, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (r, self.in_features), (self.out_features, r)

    def initialize(self, a: torch.Tensor, b: torch.Tensor, init: bool | str) -> None:
        """As PEFT does: A zero, or for False normal like B."""
        torch.nn.init.normal_(b)
        if init:
            torch.nn.init.zeros_(a)
        else:
            torch.nn.init.normal_(a)

    def input(self, operation: tx.Operation, dtype: Any) -> Any:
        return operation.args[self.input_index]

    def output(self, operation: tx.Operation, x: Any, a: Any, b: Any, scaling: float) -> Any:
        return tx.ops.linear(self.plain(operation, x, tx.ops.transpose(a, 0, 1)) * scaling, b)

    def plain(self, operation: tx.Operation, x: Any, weight: Any) -> Any:
        return tx.ops.embedding(x, weight, operation.args[2])

    def bias(self, operation: tx.Operation) -> None:
        return None

    def change(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (b @ a).T
