"""What kernels ask of the dtypes of a trace's tensors."""

from __future__ import annotations

from typing import Any

import torch


def is_floating(x: Any) -> bool:
    """Whether a tensor has a floating-point dtype."""
    return "float" in str(x.dtype)


def at_least_float32(x: Any) -> Any:
    """The dtype in which kernels keep a number a row: float64 for float64, otherwise float32."""
    return x.dtype if str(x.dtype).endswith("float64") else torch.float32
