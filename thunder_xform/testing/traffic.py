"""How often ranks communicate, and how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators of torch.distributed as the dispatcher sees them.
_KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
}
#: What the project composes of messages between ranks carries the collective's name in profiles, with this prefix.
_COMPOSED = "xform::"


class Collective(NamedTuple):
    """One collective.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"all_reduce"``, ``"broadcast"``,
            ``"barrier"``, ``"send"`` or ``"recv"``; for others, the dispatcher's name.
        nbytes: bytes of the whole tensor on one rank, the longer side where the two differ: what an all-gather fills
            and what a reduce-scatter reads. One that this project composes of messages between the ranks, as on CPU,
            counts as one, with the bytes that this rank receives: no piece of its own.
    """

    kind: str
    nbytes: int


class Traffic(TorchDispatchMode):
    """Records the collectives that this rank starts while it is active, in the forward and in the backward.

    >>> with Traffic() as traffic:
    ...     model(x).sum().backward()
    >>> traffic.count("all_gather"), traffic.nbytes("all_gather")

    Attributes:
        collectives: all of them, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self._labels: list[str] = []

    def count(self, *kinds: str) -> int:
        """How many collectives of ``kinds`` there were."""
        return sum(c.kind in kinds for c in self.collectives)

    def nbytes(self, *kinds: str) -> int:
        """How many bytes they moved together."""
        return sum(c.nbytes for c in self.collectives if c.kind in kinds)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # A subclass such as DTensor: wait for the operators on what it wraps.
        namespace, _, name = func.name().partition("::")  # type: ignore[attr-defined]
        if name == "_record_function_enter_new":
            self._enter(str(args[0]))
        elif name.startswith("_record_function_exit") and self._labels:
            self._labels.pop()
        elif namespace == "c10d":
            sizes = [sum(t.nbytes for t in tree_leaves(a) if isinstance(t, torch.Tensor)) for a in args]
            self._record(_KINDS.get(name, name), max(sizes, default=0))
        return func(*args, **(kwargs or {}))

    def _enter(self, label: str) -> None:
        self._labels.append(label)
        if label.startswith(_COMPOSED):
            self.collectives.append(Collective(label.removeprefix(_COMPOSED), 0))

    def _record(self, kind: str, nbytes: int) -> None:
        if not any(label.startswith(_COMPOSED) for label in self._labels):
            self.collectives.append(Collective(kind, nbytes))
        elif kind != "send":
            composed = self.collectives[-1]
            self.collectives[-1] = composed._replace(nbytes=composed.nbytes + nbytes)
