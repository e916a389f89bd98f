"""A bucket of sharded parameters: its flat shard, and what is gathered from it and reduced into it.

The shards of a bucket lie in one flat buffer. Gradients are reduced, or, while they accumulate locally, added to an
unsharded stash that the next reduction takes along.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thunder_xform.parallel.accumulation import accumulates
from thunder_xform.parallel.exchange import exchange
from thunder_xform.parallel.layout import ShardLayout
from thunder_xform.parallel.presence import Presence
from thunder_xform.parallel.sharded import local


class ShardedBucket:
    """Parameters that are gathered together, and whose gradients travel in one reduce-scatter.

    Args:
        label: unit and kind, for traces and messages.
        names: parameter names.
        shapes: their whole shapes.
        dtype: their dtype.
        device: where the shards live.
        group: process group that shares them.
        parameters: gives the live parameters, in the order of ``names``.
        reducing: called in every backward that reduces gradients of this bucket into ``.grad``, right before.
        gather_dtype: dtype on the wire of the all-gather; ``dtype`` if None.
        reduce_dtype: dtype in which gradients are accumulated and reduced; ``dtype`` if None.
        unreached: gives the names that the backward under way does not reach on this rank; those that another rank
            reaches are taken out.

    Attributes:
        optional: indices of the parameters that a backward may not reach; the same on all ranks.
    """

    def __init__(
        self,
        label: str,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        parameters: Callable[[], Sequence[torch.Tensor]],
        reducing: Callable[[], None] = lambda: None,
        gather_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        unreached: Callable[[], set[str]] = set,
    ) -> None:
        self.label = label
        self.names = tuple(names)
        self.dtype = dtype
        self.device = device
        self.group = group
        self.rank = dist.get_rank(group)
        self.layout = ShardLayout(shapes, dist.get_world_size(group))
        self.gather_dtype = gather_dtype or dtype
        self._exchange = exchange(self.layout, group, device, reduce_dtype or dtype, f"{label}: {self.names}")
        self._parameters = parameters
        self._reducing = reducing
        self._unreached = unreached
        self.optional: set[int] = set()
        self._flat = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        self._stash: Any = None
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

    def start_gather(self, indices: Sequence[int], shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start gathering all shards; returns a token of the gather in flight."""
        return self._token(_Flight(self._exchange.gather(self._local(indices, shards).to(self.gather_dtype))))

    def finish_gather(
        self, indices: Sequence[int], token: torch.Tensor, shards: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Wait for the gather; returns the whole tensors of ``indices`` in the dtype of their shards."""
        wholes = _land(token).finish()
        return tuple(wholes[index].to(shard.dtype) for index, shard in zip(indices, shards, strict=True))

    def gather(self) -> dict[str, torch.Tensor]:
        """All whole tensors by name, exact whatever the dtype on the wire is in training. A collective."""
        shards = [local(parameter).detach() for parameter in self._parameters()]
        indices = range(len(self.names))
        return dict(zip(self.names, self._exchange.gather(self._local(indices, shards))(), strict=True))

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients wait here for a reduction or for :meth:`reduce_stash`."""
        return self._stash is not None or bool(self._unclaimed)

    def stash(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Accumulate whole ``gradients`` locally, without communication; called from within a backward."""
        received = self._received(dict(zip(indices, gradients, strict=True)))
        if received:
            self._stash = self._exchange.accumulate(self._stash, received)
            unreached = self._unreached()
            self._stashed.update(index for index in received if self.names[index] not in unreached)

    def start_scatter(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start reducing ``gradients`` plus the stash, from within a backward; returns a token of the reduction.

        A backward that leaves ``.grad`` alone (``torch.autograd.grad``) leaves the stash alone, too.
        """
        given = dict(zip(indices, gradients, strict=True))
        received = self._received(given)
        if received:
            self._reducing()
        if not received or self._stash is None:
            presence = self._presence(given)
            return self._token(_Flight(self._exchange.reduce(None, given), presence, frozenset(given)))
        return self._token(self._reduce_stash_and(received))

    def finish_scatter(
        self, indices: Sequence[int], token: torch.Tensor, shards: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Wait for the reduction; returns the averaged gradients of ``indices``, shaped and typed as their shards."""
        reduced = self._finish(_land(token))
        return tuple(
            self.layout.local(reduced, index, self.rank).to(shard.dtype)
            for index, shard in zip(indices, shards, strict=True)
        )

    def reduce_stash(self) -> dict[str, torch.Tensor]:
        """Reduce what is accumulated locally; averaged gradient shards by name. A collective if there is any."""
        if self._stash is not None:
            self._finish(self._reduce_stash_and({}))
        found, self._unclaimed = self._unclaimed, {}
        return {self.names[index]: found[index].to(self.dtype) for index in sorted(found)}

    def discard_stash(self) -> None:
        """Forget what is accumulated locally."""
        self._stash, self._stashed, self._unclaimed = None, set(), {}

    def _received(self, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those of the gradients, by index, that the backward under way adds to ``.grad``."""
        parameters = self._parameters()
        accumulated = accumulates([parameters[index] for index in given])
        return {i: gradient for (i, gradient), adds in zip(given.items(), accumulated, strict=True) if adds}

    def _reduce_stash_and(self, gradients: Mapping[int, torch.Tensor]) -> _Flight:
        """Start reducing the stash together with ``gradients``."""
        stash, stashed = self._stash, self._stashed
        self._stash, self._stashed = None, set()
        self._unreached().difference_update(self.names[index] for index in stashed.intersection(gradients))
        presence = self._presence(gradients, stashed)
        return _Flight(self._exchange.reduce(stash, gradients), presence, frozenset(gradients), frozenset(stashed))

    def _presence(self, gradients: Mapping[int, torch.Tensor], stashed: Collection[int] = ()) -> Presence:
        """Ask which of the optional parameters have a gradient, in what is reduced, on any rank."""
        unreached = self._unreached()
        reached = {index for index in gradients if self.names[index] not in unreached}.union(stashed)
        return Presence({index: index in reached for index in sorted(self.optional)}, self.group, self.device)

    def _finish(self, flight: _Flight) -> torch.Tensor:
        """Wait for a reduction; returns the flat shard of averages, and keeps those that no operator takes."""
        reduced: torch.Tensor = flight.finish().div_(self.layout.world)
        elsewhere = flight.presence.elsewhere() if flight.presence else frozenset()
        self._unreached().difference_update(self.names[index] for index in elsewhere & flight.claimed)
        for index in (elsewhere | flight.stashed) - flight.claimed:
            gradient = self.layout.local(reduced, index, self.rank)
            earlier = self._unclaimed.get(index)
            self._unclaimed[index] = gradient if earlier is None else earlier + gradient
        return reduced

    def _token(self, flight: _Flight) -> torch.Tensor:
        """An empty tensor that stands for what is in flight in a trace."""
        token = self._flat.new_empty(0)
        token._xform_flight = flight  # type: ignore[attr-defined]
        return token


class _Flight(NamedTuple):
    """A gather or reduction under way.

    Of a reduction: which gradients other ranks have, the indices of those that an operator takes, and of those that
    this rank accumulated.
    """

    finish: Callable[[], Any]
    presence: Presence | None = None
    claimed: frozenset[int] = frozenset()
    stashed: frozenset[int] = frozenset()


def _land(token: torch.Tensor) -> _Flight:
    flight: _Flight = token.__dict__.pop("_xform_flight")
    return flight
