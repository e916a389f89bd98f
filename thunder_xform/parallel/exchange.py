"""How the tensors of a bucket travel between ranks: packed into flat buffers, or as they are.

Collectives take flat buffers, so tensors are packed for them and unpacked again. On CPU the ranks send one another rows
of the tensors themselves instead: no packing, no buffers, and none of the copies that gloo makes in its own
``all_gather_into_tensor`` and ``reduce_scatter_tensor`` (32 MB on two ranks took three times as long there).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from thunder_xform.parallel import collectives
from thunder_xform.parallel.layout import ShardLayout


class Exchange(Protocol):
    """Gathers and reductions of the tensors of a layout; all ranks call the same in the same order.

    Args:
        layout: the tensors and how they are cut.
        group: the ranks.
        reduce_dtype: dtype in which gradients are accumulated and reduced.
        label: of the tensors, the same on all ranks.
    """

    def __init__(
        self, layout: ShardLayout, group: dist.ProcessGroup, reduce_dtype: torch.dtype, label: str = ""
    ) -> None: ...

    def gather(self, local: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        """Start gathering from each rank's flat shard; the result waits, and returns the whole tensors.

        Args:
            local: this rank's flat shard; must stay as it is until the wait.
        """

    def accumulate(self, stash: Any, gradients: Mapping[int, torch.Tensor]) -> Any:
        """Add whole ``gradients``, by index, to ``stash`` in place; copies of them make a new one if it is None."""

    def reduce(self, stash: Any, gradients: Mapping[int, torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Start summing whole ``gradients`` plus ``stash`` over the ranks; the result waits for this rank's flat shard.

        What has no gradient counts as zero. ``stash`` is used up.
        """


#: Beyond, one message for each tensor and pair of ranks costs more than the copies that it saves.
_MAX_DIRECT_RANKS = 8


def exchange(
    layout: ShardLayout, group: dist.ProcessGroup, device: torch.device, reduce_dtype: torch.dtype, label: str = ""
) -> Exchange:
    """The way that suits the device and the number of ranks."""
    direct = device.type == "cpu" and 1 < layout.world <= _MAX_DIRECT_RANKS
    kind: type[Exchange] = DirectExchange if direct else PackedExchange
    return kind(layout, group, reduce_dtype, label)


class PackedExchange:
    """One collective on a rank-major buffer for all tensors."""

    def __init__(
        self, layout: ShardLayout, group: dist.ProcessGroup, reduce_dtype: torch.dtype, label: str = ""
    ) -> None:
        self._layout = layout
        self._dtype = reduce_dtype
        self._group = group

    def gather(self, local: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        world = self._layout.world
        pending, full = None, local
        if world > 1:
            full = local.new_empty(local.numel() * world)
            pending = collectives.all_gather(full, local, self._group)

        def finish() -> Sequence[torch.Tensor]:
            if pending is not None:
                pending.wait()
            flats = list(full.view(world, -1))
            return [self._layout.whole(flats, index) for index in range(len(self._layout))]

        return finish

    def accumulate(self, stash: torch.Tensor | None, gradients: Mapping[int, torch.Tensor]) -> torch.Tensor:
        if stash is not None:
            self._layout.pack(stash, gradients.items(), add=True)
            return stash
        complete = len(gradients) == len(self._layout) and not self._layout.padded
        allocate = torch.empty if complete else torch.zeros
        device = next(iter(gradients.values())).device
        full = allocate(self._layout.shard_numel * self._layout.world, dtype=self._dtype, device=device)
        self._layout.pack(full, gradients.items(), add=False)
        return full

    def reduce(self, stash: torch.Tensor | None, gradients: Mapping[int, torch.Tensor]) -> Callable[[], torch.Tensor]:
        full = self.accumulate(stash, gradients)
        if self._layout.world == 1:
            return lambda: full
        shard = full.new_empty(self._layout.shard_numel)
        pending = collectives.reduce_scatter(shard, full, self._group)

        def finish(_alive_until_the_wait: torch.Tensor = full) -> torch.Tensor:
            pending.wait()
            return shard

        return finish


class DirectExchange:
    """Each rank sends every other one the rows of each tensor that are due there.

    In profiles a gather is called ``xform::all_gather``, a reduction ``xform::reduce_scatter``.

    Messages are tagged with kind, label and number: what is sent for a gather never arrives in a reduction.
    """

    def __init__(
        self, layout: ShardLayout, group: dist.ProcessGroup, reduce_dtype: torch.dtype, label: str = ""
    ) -> None:
        self._layout = layout
        self._dtype = reduce_dtype
        self._group = group
        self._rank = dist.get_rank(group)
        self._peers = [rank for rank in range(layout.world) if rank != self._rank]
        self._label = label
        self._number = 0
        self._tag = 0

    def gather(self, local: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        wholes = [local.new_empty(self._layout.whole_shape(index)) for index in range(len(self._layout))]
        works = []
        self._begin("gather")
        with record_function("xform::all_gather"):
            for index, whole in enumerate(wholes):
                mine = self._layout.local(local, index, self._rank)
                for peer in self._peers:
                    works += self._receive(self._layout.cut(whole, index, peer), peer)
                    works += self._send(mine, peer)
        for index, whole in enumerate(wholes):
            self._layout.cut(whole, index, self._rank).copy_(self._layout.local(local, index, self._rank))

        def finish() -> Sequence[torch.Tensor]:
            _wait(works)
            return wholes

        return finish

    def accumulate(
        self, stash: dict[int, torch.Tensor] | None, gradients: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        stash = {} if stash is None else stash
        for index, gradient in gradients.items():
            if index in stash:
                stash[index].add_(gradient)
            else:
                stash[index] = gradient.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        return stash

    def reduce(
        self, stash: dict[int, torch.Tensor] | None, gradients: Mapping[int, torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        stash = stash or {}
        wholes = [self._due(stash.get(index), gradients.get(index), index) for index in range(len(self._layout))]
        received = [wholes[0].new_empty(self._layout.shard_numel) for _ in self._peers]
        works = []
        self._begin("reduce")
        with record_function("xform::reduce_scatter"):
            for index, whole in enumerate(wholes):
                for peer, flat in zip(self._peers, received, strict=True):
                    works += self._receive(self._layout.local(flat, index, self._rank), peer)
                    works += self._send(self._layout.cut(whole, index, peer), peer)

        def finish() -> torch.Tensor:
            _wait(works)
            total, *others = received
            for index, whole in enumerate(wholes):
                self._layout.local(total, index, self._rank).add_(self._layout.cut(whole, index, self._rank))
            for other in others:
                total.add_(other)
            return total

        return finish

    def _begin(self, kind: str) -> None:
        self._number += 1
        # Apart from small numbers, which are the user's own messages between the same ranks.
        self._tag = 0x40000000 | zlib.crc32(f"{kind} {self._number} {self._label}".encode()) & 0x3FFFFFFF

    def _due(self, held: torch.Tensor | None, gradient: torch.Tensor | None, index: int) -> torch.Tensor:
        if held is not None:
            return held if gradient is None else held.add_(gradient)
        if gradient is not None:
            return gradient.to(self._dtype).contiguous()
        return torch.zeros(self._layout.whole_shape(index), dtype=self._dtype)

    def _receive(self, rows: torch.Tensor, peer: int) -> list[Any]:
        return [dist.irecv(rows, group=self._group, group_src=peer, tag=self._tag)] if rows.numel() else []

    def _send(self, rows: torch.Tensor, peer: int) -> list[Any]:
        return [dist.isend(rows, group=self._group, group_dst=peer, tag=self._tag)] if rows.numel() else []


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
