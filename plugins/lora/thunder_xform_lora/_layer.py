"""What an adapter is for one kind of layer: the interface that each kind implements."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch

import thunder_xform as tx
from thunder_xform_lora.options import Options


class Layer(ABC):
    """A layer that can get an adapter. A and B have the shapes that they have in PEFT.

    Args:
        in_features, out_features: between what the layer maps.
        shape: of its weight.
    """

    #: what applies the weight, for errors
    function: ClassVar[str]
    #: names of A and B after the layer's own, with ``{}`` for the adapter's name
    parts: ClassVar[tuple[str, str]] = ("lora_A.{}.weight", "lora_B.{}.weight")
    #: which of A and B, 0 or 1, is zero in a new adapter
    starts_zero: ClassVar[Literal[0, 1]] = 1
    #: dimension of the weight that counts output features
    out_dim: ClassVar[int] = 0
    #: position of the layer's input in a call of the operator
    input_index: ClassVar[int] = 0
    #: whether dropout zeroes entries of the adapter's input
    drops: ClassVar[bool] = True
    #: whether "all-linear" means this kind
    linear: ClassVar[bool] = False

    def __init__(self, in_features: int, out_features: int, shape: tuple[int, ...]) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.shape = shape

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shape}>"

    @classmethod
    @abstractmethod
    def weight_of(cls, operation: tx.Operation) -> str | None:
        """Name of the parameter that a call applies as the weight of such a layer, or None."""

    @abstractmethod
    def shapes(self, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B of rank ``r``."""

    @abstractmethod
    def output(self, operation: tx.Operation, x: Any, a: Any, b: Any, scaling: float) -> Any:
        """In a trace: what an adapter adds to the output of a call for the input ``x``.

        ``scaling`` goes in between A and B, where there are r features to scale instead of out_features.
        """

    @abstractmethod
    def plain(self, operation: tx.Operation, x: Any, weight: Any) -> Any:
        """In a trace: what the call computes for the input ``x``, without bias."""

    @property
    def largest_rank(self) -> int:
        """How many principal components a weight has; from this rank on, an adapter can be any weight."""
        return min(self.in_features, self.out_features)

    def refusal(self, r: int, options: Options) -> str | None:
        """What about the layer keeps it from an adapter of rank ``r``, as the rest of a sentence; None for nothing."""
        return None

    @property
    def unmergeable(self) -> str | None:
        """Why no weight computes the same as the layer with its adapter; None if one does."""
        return None

    def initialize(self, a: torch.Tensor, b: torch.Tensor, init: bool | str) -> None:
        """Fill A and B as PEFT does: A like the weight of a torch.nn.Linear, or for "gaussian" from a normal
        distribution of standard deviation 1 / r; B zero, or for False like A.
        """
        if init == "gaussian":
            torch.nn.init.normal_(a, std=1 / a.shape[0])
        else:
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        if init:
            torch.nn.init.zeros_(b)
        else:
            torch.nn.init.kaiming_uniform_(b, a=math.sqrt(5))

    def input(self, operation: tx.Operation, dtype: Any) -> Any:
        """In a trace: the adapter's input, before dropout."""
        return tx.ops.to(operation.args[self.input_index], dtype)

    def bias(self, operation: tx.Operation) -> Any:
        """In a trace: the bias that the call adds, one entry an output feature; None without."""
        return operation.args[2]

    def spread(self, features: Any) -> Any:
        """In a trace: a tensor with one entry an output feature, so that it broadcasts to the output."""
        return features

    def change(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """What an adapter adds to the weight, before scaling."""
        return b @ a

    def lengths(self, weight: torch.Tensor) -> torch.Tensor:
        """Norms of what belongs to single output features in a weight, in the shape of PEFT's magnitude vector."""
        others = [d for d in range(weight.ndim) if d != self.out_dim]
        norms: torch.Tensor = torch.linalg.vector_norm(weight, dim=others)
        return norms

    def scaled(self, weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The weight with what belongs to each output feature scaled by a factor."""
        return weight * factors.reshape([-1 if d == self.out_dim else 1 for d in range(weight.ndim)])
