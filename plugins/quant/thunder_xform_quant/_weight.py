"""One weight of the model in packed form: its tensors and their names."""

from __future__ import annotations

import torch

from thunder_xform_quant.scheme import Packed, Scheme


class QuantizedWeight:
    """How to read the tensors that hold one weight. An argument of the operators in the trace.

    Attributes:
        name: of the weight; its codes go by that name.
        scheme: what they are read by.
        shape: (out_features, in_features).
        dtype: of the weight in the plain model.
        compute_dtype: in which it is multiplied; None for that of the input.
        names: of all tensors that hold it, codes first.
        buffers: those among them that are held whole by every rank.
    """

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        weight: torch.Tensor,
        compute_dtype: torch.dtype | None,
        packed: Packed,
    ) -> None:
        self.name = name
        self.scheme = scheme
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self.compute_dtype = compute_dtype
        self._rows, self._shared = tuple(packed.rows), tuple(packed.shared)
        self.buffers = tuple(f"{name}.{part}" for part in self._shared)
        self.names = (name, *(f"{name}.{part}" for part in self._rows), *self.buffers)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.scheme!r}>"

    def join(self, codes: torch.Tensor, *others: torch.Tensor) -> Packed:
        """The packed weight, from its tensors in the order of ``names``."""
        rows = dict(zip(self._rows, others, strict=False))
        shared = dict(zip(self._shared, others[len(rows) :], strict=True))
        return Packed(codes, rows, shared)

    def split(self, packed: Packed) -> dict[str, torch.Tensor]:
        """The tensors of a packed weight by name."""
        parts = (packed.codes, *packed.rows.values(), *packed.shared.values())
        return dict(zip(self.names, parts, strict=True))

    def dequantize(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The weight, from its tensors in the order of ``names``."""
        return self.scheme.dequantize(self.join(*tensors), self.shape, self.dtype)
