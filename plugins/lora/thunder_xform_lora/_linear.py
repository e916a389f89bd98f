"""Adapters of linear layers."""

from __future__ import annotations

from typing import Any

import torch

import thunder_xform as tx
from thunder_xform_lora._layer import Layer


class Linear(Layer):
    """``torch.nn.Linear``: ``y + x @ A.T @ B.T``, with A (r, in_features) and B (out_features, r)."""

    function = "torch.nn.functional.linear"
    linear = True

    def __init__(self, module: torch.nn.Linear) -> None:
        super().__init__(module.in_features, module.out_features, (module.out_features, module.in_features))

    @classmethod
    def weight_of(cls, operation: tx.Operation) -> str | None:
        return operation.linear_weight

    def shapes(self, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (r, self.in_features), (self.out_features, r)

    def output(self, operation: tx.Operation, x: Any, a: Any, b: Any, scaling: float) -> Any:
        return tx.ops.linear(tx.ops.linear(x, a) * scaling, b)

    def plain(self, operation: tx.Operation, x: Any, weight: Any) -> Any:
        return tx.ops.linear(x, weight)

    def bias(self, operation: tx.Operation) -> Any:
        return operation.linear_bias


class TransposedLinear(Linear):
    """``transformers.pytorch_utils.Conv1D``, as in GPT-2: a linear layer with a weight (in_features, out_features)."""

    function = "torch.addmm"
    out_dim = 1
    input_index = 1

    def __init__(self, module: Any) -> None:
        in_features, out_features = module.weight.shape
        Layer.__init__(self, in_features, out_features, (in_features, out_features))

    @classmethod
    def weight_of(cls, operation: tx.Operation) -> str | None:
        plain = operation.name == "addmm" and all(factor == 1 for factor in operation.kwargs.values())
        return operation.parameter(2) if plain else None

    def plain(self, operation: tx.Operation, x: Any, weight: Any) -> Any:
        return tx.ops.matmul(x, weight)

    def bias(self, operation: tx.Operation) -> Any:
        return operation.args[0]

    def change(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (b @ a).T
