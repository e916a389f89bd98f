"""Who makes a model depart from eager PyTorch: plugins are left out in turn, operators recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from thunder_xform.hookspecs import hookimpl
from thunder_xform.host.computation import Computation
from thunder_xform.host.eager import valued_copy
from thunder_xform.host.module import apply
from thunder_xform.host.operation import Operation
from thunder_xform.host.recorder import Log, record
from thunder_xform.host.types import TensorProxy
from thunder_xform.pipeline.session import Session
from thunder_xform.pipeline.stage import Stage
from thunder_xform.plugin import Plugin

if TYPE_CHECKING:
    from thunder_xform.pipeline.compare import Compare
    from thunder_xform.registry.step import Step

_Members = Sequence[tuple["Step", Any]]
#: What :func:`find_suspect` returns where the model departs without any plugin, and where none alone is to blame.
THUNDER, UNKNOWN = "", "?"


def find_suspect(session: Session, compare: Compare) -> str:
    """Name of the first plugin without which ``compare`` finds nothing; :data:`THUNDER` or :data:`UNKNOWN`.

    Each attempt transforms a copy of the plain model with fresh plugins. A collective.
    """
    if not _agrees(session, compare, [(session.steps[0], Plugin(None))]):
        return THUNDER
    if len(session.steps) == 1:
        return session.names[0]
    for left_out in range(len(session.steps)):
        members = _fresh(session, (index for index in range(len(session.steps)) if index != left_out))
        if members and _agrees(session, compare, members):
            return session.names[left_out]
    return UNKNOWN


def find_operator(session: Session, compare: Compare) -> str:
    """The first operator whose result departs, and where the model calls it; empty if none is found. A collective."""
    log = Log()
    members = _fresh(session, range(len(session.steps)))
    if not members:
        return ""
    probe = replace(session.steps[0], name="check against eager"), _Probe(log)
    try:
        other, model = _transformed(session, compare, [probe, *members])
        return compare.first_operator(other, model, log)
    except Exception:  # A help to readers of an error, which is raised either way.
        return ""


def _fresh(session: Session, indices: Iterable[int]) -> _Members:
    """Steps with new plugin objects; none if one was made by hand and cannot be made again."""
    try:
        return [(session.steps[i], type(session.plugins[i])(session.plugins[i].options)) for i in indices]
    except Exception:
        return ()


def _agrees(session: Session, compare: Compare, members: _Members) -> bool:
    """Whether the model with other plugins computes what eager PyTorch does, on all ranks."""
    fine = False
    try:
        _, deviations = compare.run(*_transformed(session, compare, members))
        fine = deviations == []
    except Exception:  # Left-over plugins may be of no use without the one left out.
        pass
    return all(compare.ranks.gather(fine).values())


def _transformed(session: Session, compare: Compare, members: _Members) -> tuple[Session, Any]:
    other = Session(session.resolution, members, verify=False)
    other.no_sync_depth = session.no_sync_depth
    other.stages = [Stage(other, index) for index in range(len(members))]
    return other, apply(valued_copy(session.module, compare.values), other.stages)


class _Probe(Plugin[None]):
    """Records what stands for the result of every operator of the model, once later plugins have rewritten it."""

    def __init__(self, log: Log) -> None:
        super().__init__(None)
        self._log = log

    @hookimpl
    def before_autograd(self, computation: Computation) -> Computation:
        return computation.rewrite(_gives_one_tensor, lambda o, edit: record(self._log, o.name, o.call()))


def _gives_one_tensor(operation: Operation) -> bool:
    return operation.operator is None and isinstance(operation.output, TensorProxy)
