"""Which gradients exist on any rank: one that is missing on this rank counts as zeros where another has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from thunder_xform.parallel import collectives


class Presence:
    """Asks all ranks which of some gradients they have; all ask for the same ones in the same order. A collective.

    Args:
        here: what there is on this rank. Without entries nothing is asked.
        group: the ranks.
        device: where the group communicates.
    """

    def __init__(self, here: Mapping[Any, bool], group: dist.ProcessGroup, device: torch.device) -> None:
        self._here = here
        self._pending: dist.Work | None = None
        if here:
            self._counts = torch.tensor(list(here.values()), dtype=torch.int32).to(device)
            self._pending = collectives.all_reduce(self._counts, group)

    def elsewhere(self) -> frozenset[Any]:
        """Those that only other ranks have; waits for their answers."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if all(self._here.values()):
            return frozenset()  # without reading what a device holds
        counts = self._counts.tolist()
        return frozenset(
            key for (key, here), count in zip(self._here.items(), counts, strict=True) if count and not here
        )
