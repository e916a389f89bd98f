"""Eight bits and one scale per output channel, on PyTorch's own operators."""

from __future__ import annotations

import torch

from thunder_xform_quant.scheme import Packed, Scheme


class Int8(Scheme):
    """Symmetric weight-only quantization: ``weight[i, j] = codes[i, j] * scale[i]``, codes from -127 to 127.

    The scale, in float32, makes the largest magnitude of a row 127. Input and output stay as they are.
    """

    def __repr__(self) -> str:
        return "int8()"

    def quantize(self, weight: torch.Tensor) -> Packed:
        weight = weight.float()
        scale = weight.abs().amax(dim=1) / 127
        divisor = torch.where(scale == 0, 1.0, scale)
        return Packed((weight / divisor[:, None]).round_().to(torch.int8), {"scale": scale})

    def dequantize(self, packed: Packed, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return (packed.codes * packed.rows["scale"][:, None]).to(dtype)

    # Scaling the outputs instead of the weight saves a pass over the weight. The kernel that PyTorch has for this,
    # _weight_int8pack_mm, is slower for float32 and for more than a few rows (up to 28 times on this package's CPUs).

    def linear(
        self, x: torch.Tensor, packed: Packed, shape: tuple[int, int], bias: torch.Tensor | None
    ) -> torch.Tensor:
        scaled = torch.nn.functional.linear(x, packed.codes.to(x.dtype)) * packed.rows["scale"].to(x.dtype)
        return scaled if bias is None else scaled + bias

    def input_gradient(self, gradient: torch.Tensor, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
        return (gradient * packed.rows["scale"].to(gradient.dtype)) @ packed.codes.to(gradient.dtype)
