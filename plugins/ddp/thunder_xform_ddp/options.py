"""Options of the plugin ``ddp``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Options:
    """How to replicate."""

    process_group: object = None
    """ProcessGroup or one dimension of a DeviceMesh to average over; None for all ranks."""

    bucket_cap_mb: Annotated[float, ">= 0"] = 25.0
    """Largest size of one gradient all-reduce, in MiB; 0 for one all-reduce per parameter."""

    broadcast_from: Annotated[int, ">= 0"] | None = 0
    """Rank within the group whose parameters and buffers all ranks start from; None to trust that they are equal."""

    release_originals: bool = False
    """Free the storage of the user's module (its parameters move to the meta device)."""

    def __post_init__(self) -> None:
        if not self.bucket_cap_mb >= 0:
            raise ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}, but a size cannot be negative")
