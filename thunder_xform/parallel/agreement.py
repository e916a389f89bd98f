"""Agreement between ranks: one pipeline everywhere, and errors that reach every rank before anyone hangs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from thunder_xform.errors import ParallelError

if TYPE_CHECKING:
    from thunder_xform.registry import Lock


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """``value`` of every rank of ``group``, in rank order. A collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def agree_on(lock: Lock, groups: Sequence[dist.ProcessGroup]) -> None:
    """Compare resolved pipelines over ``groups``. A collective.

    Raises:
        ParallelError: on every rank, with the difference, if any two ranks resolved different plugins, versions or options.
    """
    for group in groups:
        locks = gather_objects(lock.to_json(), group)
        for rank, other in enumerate(locks):
            if other != locks[0]:
                lines = "\n".join(f"  {line}" for line in type(lock).from_json(locks[0]).diff(lock.from_json(other)))
                raise ParallelError(
                    f"Ranks {dist.get_global_rank(group, 0)} and {dist.get_global_rank(group, rank)} resolved different "
                    f"pipelines:\n{lines}\n",
                    "Resolve the same names, options and versions on every rank.",
                )


@contextmanager
def together(groups: Sequence[dist.ProcessGroup], what: str) -> Iterator[None]:
    """Run a block that must succeed on all ranks or none: an error on one is raised on every rank. A collective at exit.

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
