"""A bucket of sharded parameters: its flat buffers, and the collectives on them.

The shards of a bucket lie in one flat buffer, so gathering it needs no packing. Gradients are packed once and
reduce-scattered, or, while they accumulate locally, added to an unsharded stash that the next reduce-scatter takes
along.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from thunder_xform.parallel import collectives
from thunder_xform.parallel.accumulation import accumulates
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
        shards: gives the live parameters, this rank's shards, in the order of ``names``.
        reducing: called in every backward that reduces gradients of this bucket into ``.grad``, right before.
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
        shards: Callable[[], Sequence[torch.Tensor]],
        reducing: Callable[[], None] = lambda: None,
        gather_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.label = label
        self.names = tuple(names)
        self.dtype = dtype
        self.device = device
        self.group = group
        self.rank = dist.get_rank(group)
        self.layout = ShardLayout(shapes, dist.get_world_size(group))
        self.gather_dtype = gather_dtype or dtype
        self._received_ranks = collectives.received_ranks(device, group)
        self._shards = shards
        self._reducing = reducing
        self._reduce_dtype = reduce_dtype
        self._flat = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        self._stash: torch.Tensor | None = None
        #: indices of the parameters with a gradient in the stash
        self._stashed: set[int] = set()
        #: reduced gradient shards, by index, of parameters that the backward that reduced them did not reach
        self._unclaimed: dict[int, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<bucket {self.label}>"

    # -- shards --------------------------------------------------------------------------------------------------

    def store(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Copy this rank's rows of ``whole`` into the bucket; returns the shard, in the memory of the flat buffer."""
        home = self.layout.local(self._flat, index, self.rank)
        home.copy_(self.layout.cut(whole, index, self.rank))
        # Not a view to autograd, where an update of one parameter would look like one of the whole bucket.
        shard: torch.Tensor = home.new_empty(0).set_(home)  # type: ignore[call-overload]
        return shard

    def _local(self, indices: Sequence[int], shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The flat buffer with the current values of ``shards``: nothing to do while they are views of it."""
        for index, shard in zip(indices, shards, strict=True):
            home = self.layout.local(self._flat, index, self.rank)
            if shard.data_ptr() != home.data_ptr():
                home.copy_(shard)
        return self._flat

    # -- gathering -----------------------------------------------------------------------------------------------

    @property
    def gathered_numel(self) -> int:
        """Elements of the buffer of a gather."""
        return self.layout.shard_numel * len(self._received_ranks)

    def start_gather(self, indices: Sequence[int], shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start gathering all shards; returns the buffer in flight."""
        return self._start_gather(self._local(indices, shards).to(self.gather_dtype))

    def _start_gather(self, local: torch.Tensor) -> torch.Tensor:
        buffer = local.new_empty(self.gathered_numel)
        pending = collectives.all_gather(buffer, local, self.group) if self.layout.world > 1 else None
        _fly(buffer, _Flight(pending, local.detach()))
        return buffer

    def finish_gather(
        self, indices: Sequence[int], buffer: torch.Tensor, shards: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Wait for the buffer; returns the whole tensors of ``indices`` in the dtype of their shards."""
        local = _land(buffer).local
        received = buffer.view(len(self._received_ranks), self.layout.shard_numel)
        flats = {self.rank: local} | dict(zip(self._received_ranks, received, strict=True))
        return tuple(
            self.layout.whole([flats[r] for r in range(self.layout.world)], index).to(shard.dtype)
            for index, shard in zip(indices, shards, strict=True)
        )

    def gather(self) -> dict[str, torch.Tensor]:
        """All whole tensors by name, exact whatever the dtype on the wire is in training. A collective."""
        shards = [shard.detach() for shard in self._shards()]
        indices = range(len(self.names))
        buffer = self._start_gather(self._local(indices, shards))
        return dict(zip(self.names, self.finish_gather(indices, buffer, shards), strict=True))

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients wait here for a reduction or for :meth:`reduce_stash`."""
        return self._stash is not None or bool(self._unclaimed)

    def stash(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Accumulate whole ``gradients`` locally, without communication; called from within a backward."""
        received = self._received(zip(indices, gradients, strict=True))
        if received:
            self._stash = self._packed(self._stash, received)
            self._stashed.update(index for index, _ in received)

    def start_scatter(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start reducing ``gradients`` plus the stash, from within a backward.

        A backward that leaves ``.grad`` alone (``torch.autograd.grad``) leaves the stash alone, too.

        Returns:
            This rank's flat shard of the sum, in flight.
        """
        given = list(zip(indices, gradients, strict=True))
        received = self._received(given)
        if received:
            self._reducing()
        if not received or self._stash is None:
            return self._reduce(self._packed(None, given))
        unclaimed = self._stashed.difference(index for index, _ in received)
        return self._reduce(self._packed(self._take_stash(), received), unclaimed)

    def finish_scatter(
        self, indices: Sequence[int], reduced: torch.Tensor, shards: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Wait for the shard; returns the averaged gradients of ``indices``, shaped and typed as their shards."""
        unclaimed = _land(reduced).unclaimed
        reduced.div_(self.layout.world)
        for index in unclaimed:
            gradient = self.layout.local(reduced, index, self.rank)
            earlier = self._unclaimed.get(index)
            self._unclaimed[index] = gradient if earlier is None else earlier + gradient
        return tuple(
            self.layout.local(reduced, index, self.rank).to(shard.dtype)
            for index, shard in zip(indices, shards, strict=True)
        )

    def reduce_stash(self) -> dict[str, torch.Tensor]:
        """Reduce what is accumulated locally; averaged gradient shards by name. A collective if there is any."""
        if self._stash is not None:
            unclaimed = self._stashed
            self.finish_scatter((), self._reduce(self._take_stash(), unclaimed), ())
        found, self._unclaimed = self._unclaimed, {}
        shards = self._shards()
        return {self.names[index]: found[index].to(shards[index].dtype) for index in sorted(found)}

    def discard_stash(self) -> None:
        """Forget what is accumulated locally."""
        self._stash, self._stashed, self._unclaimed = None, set(), {}

    def _received(self, given: Iterable[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """Those of the gradients, given with their indices, that the backward under way adds to ``.grad``."""
        shards = self._shards()
        return [(index, gradient) for index, gradient in given if accumulates(shards[index])]

    def _take_stash(self) -> torch.Tensor:
        taken, self._stash, self._stashed = self._stash, None, set()
        assert taken is not None
        return taken

    def _packed(self, stash: torch.Tensor | None, given: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Gradients, given with their indices, in a rank-major buffer: a new one, or added to ``stash``."""
        if stash is not None:
            self.layout.pack(stash, given, add=True)
            return stash
        sample = given[0][1]
        complete = len(given) == len(self.names) and not self.layout.padded
        allocate = torch.empty if complete else torch.zeros
        numel, dtype = self.layout.shard_numel * self.layout.world, self._reduce_dtype or sample.dtype
        full = allocate(numel, dtype=dtype, device=sample.device)
        self.layout.pack(full, given, add=False)
        return full

    def _reduce(self, full: torch.Tensor, unclaimed: Collection[int] = ()) -> torch.Tensor:
        """Start summing ``full`` over the ranks; returns this rank's shard of it, in flight."""
        if self.layout.world == 1:
            _fly(full, _Flight(unclaimed=unclaimed))
            return full
        shard = full.new_empty(self.layout.shard_numel)
        _fly(shard, _Flight(collectives.reduce_scatter(shard, full, self.group), full, unclaimed))
        return shard


class _Flight(NamedTuple):
    """A collective under way, what this rank brings to it, and gradients in it that no operator takes."""

    pending: collectives.Pending | None = None
    local: torch.Tensor | None = None
    unclaimed: Collection[int] = ()


def _fly(buffer: torch.Tensor, flight: _Flight) -> None:
    """Attach a collective under way to the buffer that it fills."""
    buffer._xform_flight = flight  # type: ignore[attr-defined]


def _land(buffer: torch.Tensor) -> _Flight:
    """Wait for what fills the buffer."""
    flight: _Flight = buffer.__dict__.pop("_xform_flight", _Flight())
    if flight.pending is not None:
        flight.pending.wait()
    return flight
