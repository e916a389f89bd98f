"""What a quantization scheme is: the interface that the plugin, and whoever publishes a scheme, goes by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight matrix in few bits.

    Attributes:
        codes: integers of shape (out_features, ...): row i encodes row i of the weight, so that plugins may cut
            the tensor between ranks.
        rows: what else belongs to single rows, such as scales, by name; of shape (out_features, ...), too.
        shared: by name, small tensors that belong to the weight as a whole. Every rank holds them.
    """

    codes: torch.Tensor
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.codes, *self.rows.values(), *self.shared.values()))


class Scheme(ABC):
    """A way to hold a weight matrix in few bits.

    Subclasses implement :meth:`quantize` and :meth:`dequantize`; they override :meth:`linear` and
    :meth:`input_gradient` where there are kernels on the packed form. Methods get plain tensors on whatever device
    the model is, and leave them as they are. ``repr`` names the scheme and its settings; it becomes the layout of
    the parameters.
    """

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> Packed:
        """Encode a floating-point weight of shape (out_features, in_features), all entries finite.

        Shapes and dtypes of the result depend on those of the weight alone.
        """

    @abstractmethod
    def dequantize(self, packed: Packed, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """The weight of ``shape`` that ``packed`` encodes, in ``dtype``."""

    def linear(
        self, x: torch.Tensor, packed: Packed, shape: tuple[int, int], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``torch.nn.functional.linear`` of an input of shape (..., in_features); its dtype is the bias's, too."""
        return torch.nn.functional.linear(x, self.dequantize(packed, shape, x.dtype), bias)

    def input_gradient(self, gradient: torch.Tensor, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
        """The gradient of the input, given that of the output, of shape (..., out_features)."""
        return gradient @ self.dequantize(packed, shape, gradient.dtype)
