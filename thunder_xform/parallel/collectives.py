"""Collectives on flat buffers, started asynchronously.

On CPU tensors gathers and reduce-scatters are exchanges between pairs of ranks: every rank sends each other one its
piece, and receives theirs into memory that holds nothing else. That is what gloo's own collectives do inside, without
their copies: gloo's gather and reduce-scatter of 32 MB on two ranks took three times as long. Elsewhere they are NCCL's
own. In profiles all have the names ``xform::all_gather`` and ``xform::reduce_scatter``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

#: Keeps these messages apart from the user's own between the same ranks.
_TAG = 0x7866


class Pending:
    """A collective under way."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        """Block (on CUDA: the current stream) until the result is there."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()


def received_ranks(device: torch.device, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Ranks whose shards :func:`all_gather` puts into its buffer: on CPU not this rank's own, which is at hand."""
    world = dist.get_world_size(group)
    own = dist.get_rank(group) if device.type == "cpu" or world == 1 else None
    return tuple(rank for rank in range(world) if rank != own)


def all_gather(buffer: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Fill ``buffer``, flat, with the flat ``shard`` of each of the :func:`received_ranks`, in their order."""
    with record_function("xform::all_gather"):
        if shard.device.type != "cpu":
            return Pending([dist.all_gather_into_tensor(buffer, shard, group=group, async_op=True)])
        peers = received_ranks(shard.device, group)
        return Pending(_exchange(dict.fromkeys(peers, shard), buffer.view(len(peers), shard.numel()), group))


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Fill the flat ``shard`` with this rank's piece of the sum of ``full``, flat, over the ranks.

    ``full`` must live, unchanged, until the wait.
    """
    with record_function("xform::reduce_scatter"):
        if shard.device.type != "cpu":
            return Pending([dist.reduce_scatter_tensor(shard, full, group=group, async_op=True)])
        pieces = full.view(dist.get_world_size(group), shard.numel())
        peers = received_ranks(shard.device, group)
        received = full.new_empty(len(peers), shard.numel())
        works = _exchange({peer: pieces[peer] for peer in peers}, received, group)

    def add_up() -> None:
        torch.add(pieces[dist.get_rank(group)], received[0], out=shard)
        for piece in received[1:]:
            shard.add_(piece)

    return Pending(works, add_up)


def _exchange(pieces: Mapping[int, torch.Tensor], received: torch.Tensor, group: dist.ProcessGroup) -> list[Any]:
    """Send each peer its piece, and receive one from each into the rows of ``received``."""
    receives = [
        dist.irecv(row, group=group, group_src=peer, tag=_TAG) for peer, row in zip(pieces, received, strict=True)
    ]
    sends = [dist.isend(piece, group=group, group_dst=peer, tag=_TAG) for peer, piece in pieces.items()]
    return receives + sends


def all_reduce(flat: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum ``flat`` over the ranks, in place."""
    return Pending([dist.all_reduce(flat, group=group, async_op=True)])


def in_chunks(tensors: Iterable[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of one dtype and device, up to ``max_bytes`` together (one tensor at least)."""
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        same = chunk and (tensor.dtype, tensor.device) == (chunk[0].dtype, chunk[0].device)
        if chunk and (not same or size + tensor.nbytes > max_bytes):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk


def broadcast(tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup, max_bytes: int = 2**25) -> None:
    """Overwrite ``tensors`` with those of the rank ``source`` (within ``group``), in flat pieces of ``max_bytes``."""
    origin = dist.get_global_rank(group, source)
    with torch.no_grad():
        for chunk in in_chunks(tensors, max_bytes):
            flat = torch.cat([t.reshape(-1) for t in chunk])
            dist.broadcast(flat, src=origin, group=group)
            for tensor, values in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
                tensor.copy_(values.view_as(tensor))
