"""Operators that treat every element of their tensors alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

#: Of one tensor, or of lists of tensors that correspond to each other.
_NAMES = (
    *("abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "copy", "div", "exp", "lerp", "log", "maximum"),
    *("minimum", "mul", "neg", "pow", "reciprocal", "rsqrt", "sign", "sqrt", "sub", "zero"),
)
_OTHERS = (
    *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
    *("clone", "detach", "empty_like", "fill_", "full_like", "ones_like", "zeros_like"),
)


def _overloads() -> Iterator[Any]:
    names = {f"{prefix}{name}{suffix}" for name in _NAMES for prefix in ("", "_foreach_") for suffix in ("", "_")}
    for name in sorted({*names, *_OTHERS}):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            if not overload.endswith("out"):
                yield getattr(packet, overload)


#: The result lies where the operands do, and each rank's part of it depends on this rank's parts alone.
ELEMENTWISE = frozenset(_overloads())

#: Unscales gradients, and finds out whether one of them overflowed.
SCALING = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

#: The norm of all elements, of one tensor or of each in a list.
NORMS = frozenset({torch.ops.aten.linalg_vector_norm.default, torch.ops.aten._foreach_norm.Scalar})


@cache
def mutates(func: Any) -> bool:
    """Whether the operator writes to its first argument."""
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].is_write
