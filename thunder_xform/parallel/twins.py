"""Process groups of one's own over the same ranks, so that what is asked there never meets the model's messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thunder_xform.errors import ParallelError
from thunder_xform.parallel.agreement import gather_objects

#: How long a rank waits for the others, which may be compiling.
_TIMEOUT = timedelta(minutes=5)


class Twins:
    """Twins of the process groups of a mesh, on gloo. Making them is a collective.

    Args:
        groups: process groups of which this rank is a member.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._twins: dict[tuple[int, ...], Any] = {}
        for group in groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks not in self._twins:
                self._twins[ranks] = dist.new_group(
                    list(ranks), timeout=_TIMEOUT, backend="gloo", use_local_synchronization=True
                )

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The twins, each twice: after two rounds over the dimensions of a mesh every rank has heard of every other."""
        return [*self._twins.values()] * 2

    def gather(self, value: Any) -> dict[int, Any]:
        """The value of every rank, by its global number, in order. A collective.

        Raises:
            ParallelError: a rank does not take part.
        """
        found = {dist.get_rank() if self._twins else 0: value}
        for twin in self.groups:
            try:
                theirs = gather_objects(found, twin)
            except RuntimeError as error:
                raise ParallelError(
                    f"Not all ranks made this call of the model within {_TIMEOUT} ({error}).",
                    "With check='eager', call the model equally often, in the same modes, on every rank.",
                ) from error
            for each in theirs:
                found |= each
        return dict(sorted(found.items()))

    def mean(self, tensor: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
        """The mean of a tensor over the ranks of ``groups``, dimensions of the mesh, in double precision."""
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        total = tensor.detach().to("cpu", wide, copy=True).contiguous()
        for ranks in dict.fromkeys(tuple(dist.get_process_group_ranks(group)) for group in groups):
            dist.all_reduce(total, group=self._twins[ranks])
            total /= len(ranks)
        return total.to(tensor.device)
