"""Agreement between ranks: one pipeline everywhere, and errors that reach every rank before anyone hangs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, Protocol, Self

import torch.distributed as dist

from thunder_xform.errors import ParallelError, spell

#: Differences that a message lists.
_SHOWN = 10


class Lock(Protocol):
    """What is needed of the lock of a resolution."""

    @classmethod
    def from_json(cls, text: str) -> Self: ...
    def to_json(self) -> str: ...
    def diff(self, other: Self) -> tuple[str, ...]: ...


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """``value`` of every rank of ``group``, in rank order. A collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def agree_on(lock: Lock, model: Mapping[str, str], groups: Sequence[dist.ProcessGroup]) -> None:
    """Compare what the ranks of ``groups`` are about to do. A collective.

    Args:
        lock: the resolved pipeline.
        model: a description of every parameter and buffer, by name.
        groups: process groups; what one of them finds is told to the later ones.

    Raises:
        ParallelError: on every rank, with the first differences, if any two ranks resolved other plugins, versions or
            options, or built another model.
    """
    own = (lock.to_json(), dict(model))
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    found: ParallelError | None = None
    for group in groups:
        answers = gather_objects((digest, found), group)
        found = found or next((theirs for _, theirs in answers if theirs is not None), None)
        digests = [theirs for theirs, _ in answers]
        other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
        if other is not None:
            everyone = gather_objects(own, group)
            ranks = dist.get_global_rank(group, 0), dist.get_global_rank(group, other)
            found = found or _disagreement(type(lock), everyone[0], everyone[other], ranks)
    if found is not None:
        raise found


def _disagreement(
    lock: type[Lock], a: tuple[str, dict[str, str]], b: tuple[str, dict[str, str]], ranks: tuple[int, int]
) -> ParallelError:
    if a[0] != b[0]:
        what = "resolved different pipelines"
        remedy = "Resolve the same names, options and versions on every rank."
        lines = lock.from_json(a[0]).diff(lock.from_json(b[0]))
    else:
        what = "built different models"
        remedy = "Build the same model on every rank; only the values may differ."
        lines = tuple(
            f"{name}: {a[1].get(name, 'absent')} -> {b[1].get(name, 'absent')}"
            for name in sorted(a[1].keys() | b[1].keys())
            if a[1].get(name) != b[1].get(name)
        )
    shown = [*lines[:_SHOWN], *([f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]
    told = "".join(f"\n  {line}" for line in shown)
    return ParallelError(f"Ranks {ranks[0]} and {ranks[1]} {what}:{told}\n", remedy, ranks=ranks, differences=lines)


def refuse_overlaps(groups: Sequence[tuple[str, dist.ProcessGroup]]) -> None:
    """Refuse process groups, each with the plugin that uses it, that are not dimensions of one mesh.

    Raises:
        ParallelError: groups of two plugins share more ranks than this one.
    """
    for (a, first), (b, second) in combinations(groups, 2):
        shared = sorted({*dist.get_process_group_ranks(first)} & {*dist.get_process_group_ranks(second)})
        if a != b and len(shared) > 1:
            raise ParallelError(
                f"Plugins {a!r} and {b!r} both divide the data among the ranks {spell(map(str, shared))}.",
                "Give them different dimensions of one DeviceMesh as process_group.",
                plugins=(a, b),
                ranks=tuple(shared),
            )


@contextmanager
def together(groups: Sequence[dist.ProcessGroup], what: str) -> Iterator[None]:
    """Run a block that must succeed on all ranks or none: an error on one is raised on each. A collective at exit.

    Raises:
        ParallelError: on the ranks whose own block was fine, naming the ranks that failed and their errors.
    """
    own: BaseException | None = None
    try:
        yield
    except Exception as error:
        own = error
    failures: dict[int, str] = {}
    for group in groups:
        mine = {dist.get_rank(): f"{type(own).__name__}: {own}"} if own is not None else {}
        for theirs in gather_objects(failures | mine, group):
            failures |= theirs
    if own is not None:
        raise own
    if failures:
        told = "; ".join(f"rank {rank}: {failure}" for rank, failure in sorted(failures.items()))
        raise ParallelError(f"{what} failed on another rank ({told}).", "Fix it there; this rank stopped with it.")
