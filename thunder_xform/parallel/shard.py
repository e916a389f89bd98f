"""Sharded parameters: buckets that are gathered before use and whose gradients are reduced into shards.

A bucket's shards are views of one flat buffer, so gathering it needs no packing. ``gather_start`` and ``gather_wait``
put an asynchronous all-gather between the stored shards and the model's operators; the gradient of ``gather_wait`` packs
the gradients and reduce-scatters them (``scatter_start``, ``scatter_wait``), or, while gradients accumulate locally, adds
them to an unsharded buffer (``stash``) that the next reduce-scatter takes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from thunder_xform.host.operators import operator, tensor_like
from thunder_xform.parallel import collectives
from thunder_xform.parallel.layout import ShardLayout


class ShardedBucket:
    """Parameters that are gathered together, and whose gradients travel in one reduce-scatter.

    Args:
        label: unit and kind, for traces and messages.
        names: parameter names.
        shapes: their whole shapes.
        dtype: their dtype.
        device: where the shards live.
        group: process group that shares them.
        gather_dtype: dtype on the wire of the all-gather; ``dtype`` if None.
        reduce_dtype: dtype in which gradients are accumulated and reduced; their own if None.
    """

    def __init__(
        self,
        label: str,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        gather_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.label = label
        self.names = tuple(names)
        self.group = group
        self.rank = dist.get_rank(group)
        self.layout = ShardLayout(shapes, dist.get_world_size(group))
        self.gather_dtype = gather_dtype or dtype
        self._reduce_dtype = reduce_dtype
        self._flat = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        self._stash: torch.Tensor | None = None
        #: indices of the parameters with a gradient in the stash
        self._stashed: set[int] = set()

    def __repr__(self) -> str:
        return f"<bucket {self.label}>"

    # -- shards --------------------------------------------------------------------------------------------------

    def store(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Copy this rank's rows of ``whole`` into the bucket; returns the shard, a view of the flat buffer."""
        shard = self.layout.local(self._flat, index, self.rank)
        shard.copy_(self.layout.cut(whole, index, self.rank))
        return shard

    def _local(self, indices: Sequence[int], shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The flat buffer with the current values of ``shards``: nothing to do while they are views of it."""
        for index, shard in zip(indices, shards, strict=True):
            home = self.layout.local(self._flat, index, self.rank)
            if shard.data_ptr() != home.data_ptr():
                home.copy_(shard)
        return self._flat

    # -- gathering -----------------------------------------------------------------------------------------------

    def start_gather(self, indices: Sequence[int], shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start gathering all shards; returns the rank-major buffer in flight."""
        local = self._local(indices, shards).to(self.gather_dtype)
        if self.layout.world == 1:
            return local.detach()
        full = local.new_empty(local.numel() * self.layout.world)
        _fly(full, collectives.all_gather(full, local, self.group))
        return full

    def finish_gather(
        self, indices: Sequence[int], full: torch.Tensor, shards: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Wait for the buffer; returns the whole tensors of ``indices`` in the dtype of their shards."""
        _land(full)
        return tuple(
            self.layout.whole(full, index).to(shard.dtype) for index, shard in zip(indices, shards, strict=True)
        )

    def gather(self) -> dict[str, torch.Tensor]:
        """All whole tensors by name. A collective, outside any trace."""
        shards = [self.layout.local(self._flat, i, self.rank) for i in range(len(self.names))]
        indices = range(len(self.names))
        full = self.start_gather(indices, shards)
        return dict(zip(self.names, self.finish_gather(indices, full, shards), strict=True))

    # -- gradients -----------------------------------------------------------------------------------------------

    def stash(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Add whole ``gradients`` to what is accumulated locally. No communication."""
        self._stash = self._accumulated(indices, gradients)
        self._stashed.update(indices)

    def start_scatter(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start reducing ``gradients`` and the stash; returns this rank's flat shard of the sum, in flight."""
        full = self._accumulated(indices, gradients)
        self._stash = None
        self._stashed = set()
        if self.layout.world == 1:
            return full
        shard = full.new_empty(self.layout.shard_numel)
        _fly(shard, collectives.reduce_scatter(shard, full, self.group), full)
        return shard

    def finish_scatter(
        self, indices: Sequence[int], reduced: torch.Tensor, shards: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Wait for the shard; returns the averaged gradients of ``indices``, shaped and typed as their shards."""
        _land(reduced)
        reduced.div_(self.layout.world)
        return tuple(
            self.layout.local(reduced, index, self.rank).to(shard.dtype)
            for index, shard in zip(indices, shards, strict=True)
        )

    def reduce_stash(self) -> dict[str, torch.Tensor]:
        """Reduce what is accumulated locally; averaged gradient shards by name. A collective if there is any."""
        if self._stash is None:
            return {}
        indices = sorted(self._stashed)
        shards = [self.layout.local(self._flat, i, self.rank) for i in indices]
        gradients = self.finish_scatter(indices, self.start_scatter((), ()), shards)
        return {self.names[i]: gradient for i, gradient in zip(indices, gradients, strict=True)}

    def discard_stash(self) -> None:
        """Forget what is accumulated locally."""
        self._stash = None
        self._stashed = set()

    def _accumulated(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The stash plus ``gradients``, in one rank-major buffer."""
        if self._stash is not None:
            fresh = [(i, g) for i, g in zip(indices, gradients, strict=True)]
            self.layout.pack(self._stash, fresh, add=True)
            return self._stash
        dtype = self._reduce_dtype or gradients[0].dtype
        complete = len(indices) == len(self.names) and not self.layout.padded
        allocate = torch.empty if complete else torch.zeros
        full = allocate(self.layout.shard_numel * self.layout.world, dtype=dtype, device=gradients[0].device)
        self.layout.pack(full, zip(indices, gradients, strict=True), add=False)
        return full


def _fly(buffer: torch.Tensor, pending: collectives.Pending, *keep: torch.Tensor) -> None:
    """Attach a collective under way, and the tensors that must outlive it, to the buffer that it fills."""
    buffer._xform_in_flight = (pending, keep)  # type: ignore[attr-defined]


def _land(buffer: torch.Tensor) -> None:
    pending, _ = buffer.__dict__.pop("_xform_in_flight", (None, ()))
    if pending is not None:
        pending.wait()


def _flat_like(numel: int, proxy: Any, dtype: torch.dtype | None = None) -> Any:
    return tensor_like(proxy, shape=(numel,), dtype=dtype, requires_grad=False)


def _wholes(bucket: ShardedBucket, indices: Any, train: Any, sync: bool, full: Any, *shards: Any) -> tuple[Any, ...]:
    return tuple(
        tensor_like(shard, shape=bucket.layout.whole_shape(index)) for index, shard in zip(indices, shards, strict=True)
    )


def _gather_backward(inputs: tuple[Any, ...], outputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> Sequence[Any]:
    bucket, indices, train, sync, _, *shards = inputs
    result: list[Any] = [None] * len(inputs)
    positions = [i for i, index in enumerate(indices) if index in train]
    wanted = [gradients[i] for i in positions]
    if not wanted:
        return result
    if not sync:
        stash(bucket, train, *wanted)
        return result
    reduced = scatter_start(bucket, train, *wanted)
    pieces = scatter_wait(bucket, train, reduced, *[shards[i] for i in positions])
    for position, piece in zip(positions, pieces, strict=True):
        result[len(inputs) - len(shards) + position] = piece
    return result


#: ``gather_start(bucket, indices, *shards) -> buffer in flight``
gather_start = operator(
    "xform_gather_start",
    meta=lambda bucket, indices, *shards: _flat_like(
        bucket.layout.shard_numel * bucket.layout.world, shards[0], bucket.gather_dtype
    ),
    fn=lambda bucket, indices, *shards: bucket.start_gather(indices, shards),
    backward=lambda inputs, outputs, gradients: [None] * len(inputs),
    collective=True,
)

#: ``gather_wait(bucket, indices, train, sync, buffer, *shards) -> whole tensors``; the tensors whose index is in ``train``
#: get gradients: reduced into shards if ``sync``, else stashed.
gather_wait = operator(
    "xform_gather_wait",
    meta=_wholes,
    fn=lambda bucket, indices, train, sync, full, *shards: bucket.finish_gather(indices, full, shards),
    backward=_gather_backward,
    collective=True,
)

#: ``scatter_start(bucket, indices, *gradients) -> shard of the sum, in flight``
scatter_start = operator(
    "xform_scatter_start",
    meta=lambda bucket, indices, *gradients: _flat_like(bucket.layout.shard_numel, gradients[0], bucket._reduce_dtype),
    fn=lambda bucket, indices, *gradients: bucket.start_scatter(indices, gradients),
    collective=True,
    side_effects=True,
)

#: ``scatter_wait(bucket, indices, shard, *shards) -> averaged gradients``
scatter_wait = operator(
    "xform_scatter_wait",
    meta=lambda bucket, indices, reduced, *shards: tuple(tensor_like(s, requires_grad=False) for s in shards),
    fn=lambda bucket, indices, reduced, *shards: bucket.finish_scatter(indices, reduced, shards),
    collective=True,
)

#: ``stash(bucket, indices, *gradients)``: accumulate locally.
stash = operator(
    "xform_stash_gradients",
    meta=lambda bucket, indices, *gradients: None,
    fn=lambda bucket, indices, *gradients: bucket.stash(indices, gradients),
    side_effects=True,
)
