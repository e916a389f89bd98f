"""Options of the plugin ``fsdp``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

Dtype = Literal["float32", "float16", "bfloat16", "float64"]


@dataclass(frozen=True)
class Options:
    """How to shard."""

    zero: Literal[2, 3] = 3
    """3 frees gathered weights after use and gathers them again in the backward; 2 keeps them for it."""

    units: Literal["block", "layer", "none"] | Sequence[str | type] = "block"
    """What is gathered together: "block" (repeated children of a ModuleList or Sequential), "layer" (each module that
    owns parameters), "none" (each parameter), or a list of module classes, their names, or dotted module names."""

    process_group: object = None
    """ProcessGroup or one dimension of a DeviceMesh to shard over; None for all ranks."""

    device: str | None = None
    """Where shards live and computation runs; the model's device, or the process group's if the model is on meta."""

    broadcast_from: Annotated[int, ">= 0"] | None = 0
    """Rank within the group whose values all ranks start from; None to trust that the model's are equal. What other
    plugins added is broadcast from rank 0 even then."""

    meta_init: Literal["reset", "empty"] = "reset"
    """How to fill parameters on the meta device: their module's ``reset_parameters``, or zeros to be overwritten by a
    checkpoint."""

    release_originals: bool = False
    """Free the storage of the user's module (its parameters move to the meta device)."""

    gather_dtype: Dtype | None = None
    """Dtype on the wire of all-gathers, for example "bfloat16"; the parameters' own if None."""

    reduce_dtype: Dtype | None = None
    """Dtype in which gradients are accumulated and reduced, for example "float32"; their own if None."""

    prefetch: Annotated[int, ">= 0"] = 1
    """How many units are gathered ahead of the one in use."""

    reduce_each_microbatch: bool = False
    """Reduce gradients in every backward, ``no_sync`` or not: more communication, no unsharded gradients in memory."""

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ValueError(f"prefetch is {self.prefetch}, but a number of units cannot be negative")
        if isinstance(self.units, str) and self.units not in ("block", "layer", "none"):
            raise ValueError(f'units is {self.units!r}; it is "block", "layer", "none" or a list')
        if not isinstance(self.units, str):
            if not all(isinstance(unit, str | type) for unit in self.units):
                raise ValueError(f"units is {self.units!r}; a list contains names and module classes")
            names = tuple(unit if isinstance(unit, str) else unit.__name__ for unit in self.units)
            object.__setattr__(self, "units", names)
        for name in ("gather_dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, *get_args(Dtype)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(get_args(Dtype))}")
