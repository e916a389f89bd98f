"""Four bits with one scale per block, through bitsandbytes."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, ClassVar

import torch

from thunder_xform_quant.scheme import Packed, Scheme

_BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
#: How many scales share one in double quantization; bitsandbytes' matrix product takes no other.
_NESTED_BLOCKSIZE = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _bitsandbytes() -> Any:
    """The package, which takes seconds to import and may be missing."""
    return importlib.import_module("bitsandbytes")


@cache
def _nested_code(device: torch.device) -> torch.Tensor:
    """The 256 values of double quantization, those of ``quantize_blockwise``."""
    return _bitsandbytes().functional.create_dynamic_map().to(device)  # type: ignore[no-any-return]


class FourBit(Scheme):
    """Blockwise 4-bit quantization (Dettmers et al., "QLoRA", NeurIPS 2023), with bitsandbytes' values.

    Blocks never straddle rows. Where in_features is a multiple of the block size, codes and scales are those of
    ``bitsandbytes.nn.Linear4bit``; otherwise the last block of a row is shorter. Two codes share a byte, the earlier
    one in its upper half; of a row with an odd number of entries the last half byte means nothing.

    Args:
        blocksize: entries that share a scale.
        double_quant: hold the scales in 8 bits, 256 of them sharing a scale in turn.

    Raises:
        ValueError: no such block size.
        ModuleNotFoundError: bitsandbytes is not installed.
    """

    kind: ClassVar[str]

    def __init__(self, blocksize: int = 64, double_quant: bool = False) -> None:
        if blocksize not in _BLOCKSIZES:
            raise ValueError(f"`blocksize` is {blocksize!r}; it is one of {', '.join(map(str, _BLOCKSIZES))}")
        _bitsandbytes()
        self._blocksize = blocksize
        self._double_quant = double_quant

    def __repr__(self) -> str:
        return f"{self.kind}(blocksize={self._blocksize}, double_quant={self._double_quant})"

    def quantize(self, weight: torch.Tensor) -> Packed:
        out_features, in_features = weight.shape
        weight = weight if weight.dtype in _DTYPES else weight.float()
        surplus = -in_features % self._blocksize
        codes, state = _bitsandbytes().functional.quantize_4bit(
            torch.nn.functional.pad(weight, (0, surplus)).contiguous(),
            blocksize=self._blocksize,
            compress_statistics=self._double_quant,
            quant_type=self.kind,
        )
        codes = codes.view(out_features, -1)[:, : (in_features + 1) // 2].contiguous()
        rows = {"absmax": state.absmax.view(out_features, -1)}
        if not self._double_quant:
            return Packed(codes, rows)
        return Packed(codes, rows, {"nested_absmax": state.state2.absmax, "nested_offset": state.offset})

    def dequantize(self, packed: Packed, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        codes, state = self._state(packed, shape, dtype if dtype in _DTYPES else torch.float32)
        return _bitsandbytes().functional.dequantize_4bit(codes, state)[:, : shape[1]].to(dtype)  # type: ignore[no-any-return]

    def linear(
        self, x: torch.Tensor, packed: Packed, shape: tuple[int, int], bias: torch.Tensor | None
    ) -> torch.Tensor:
        if x.dtype not in _DTYPES or shape[1] % self._blocksize:
            return super().linear(x, packed, shape, bias)
        codes, state = self._state(packed, shape, x.dtype)
        return _bitsandbytes().matmul_4bit(x, codes, state, bias=bias)  # type: ignore[no-any-return]

    def _state(self, packed: Packed, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Codes and state as bitsandbytes has them, for rows of whole blocks."""
        functional = _bitsandbytes().functional
        out_features, in_features = shape
        surplus = -in_features % self._blocksize
        codes = packed.codes
        if surplus:
            codes = torch.nn.functional.pad(codes, (0, (in_features + surplus) // 2 - codes.shape[1]))
        nested, offset = None, None
        if self._double_quant:
            nested = functional.QuantState(
                absmax=packed.shared["nested_absmax"],
                code=_nested_code(codes.device),
                blocksize=_NESTED_BLOCKSIZE,
                dtype=torch.float32,
            )
            offset = packed.shared["nested_offset"]
        state = functional.QuantState(
            absmax=packed.rows["absmax"].reshape(-1),
            shape=torch.Size((out_features, in_features + surplus)),
            code=functional.get_4bit_type(self.kind, device=codes.device),
            blocksize=self._blocksize,
            quant_type=self.kind,
            dtype=dtype,
            offset=offset,
            state2=nested,
        )
        return codes.reshape(-1, 1), state


class NF4(FourBit):
    """Four-bit NormalFloat: the 16 values are quantiles of a normal distribution."""

    kind = "nf4"


class FP4(FourBit):
    """Four-bit floating-point numbers: sign, two exponent bits, one mantissa bit."""

    kind = "fp4"
