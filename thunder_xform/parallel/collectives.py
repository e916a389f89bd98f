"""Collectives on flat buffers, started asynchronously.

``wait()`` of what they return blocks (on CUDA: the current stream) until the result is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Fill ``full``, flat, with the flat ``shard`` of every rank in rank order."""
    return dist.all_gather_into_tensor(full, shard, group=group, async_op=True)


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Fill the flat ``shard`` with this rank's piece of the sum of ``full``, flat, over the ranks."""
    return dist.reduce_scatter_tensor(shard, full, group=group, async_op=True)


def all_reduce(flat: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Sum ``flat`` over the ranks, in place."""
    return dist.all_reduce(flat, group=group, async_op=True)


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
