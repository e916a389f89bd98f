"""Options of the plugin ``aten``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import thunder_xform as tx

#: The operators that can be put on kernels of PyTorch's, by their names in Thunder's traces.
Operator = Literal[
    "chunk",
    "gelu",
    "layer_norm",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "silu",
    "tensor_split",
    "unbind",
]
OPERATORS: tuple[Operator, ...] = get_args(Operator)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which operators."""

    operators: Operator | Sequence[Operator] = OPERATORS
    """Names of operators, as in torch and torch.nn.functional. A fusing executor, "torchcompile" say, cannot fuse
    those that are named."""

    def __post_init__(self) -> None:
        names = (self.operators,) if isinstance(self.operators, str) else tuple(self.operators)
        for name in names:
            if name not in OPERATORS:
                hint = tx.errors.closest(name, OPERATORS) if isinstance(name, str) else ""
                raise ValueError(f"`operators` has {name!r}.{hint} Use any of {tx.errors.spell(OPERATORS)}")
        object.__setattr__(self, "operators", names)
