"""The pipeline: a list of Thunder transforms made from a resolution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from thunder_xform.pipeline.session import Session
from thunder_xform.pipeline.stage import Stage

if TYPE_CHECKING:
    from thunder_xform.registry import Lock, Resolution, Step


class Pipeline(list[Any]):
    """An ordered list of Thunder transforms, one per plugin, for one model.

    Pass it to ``thunder.jit(model, transforms=pipeline)``; adding Thunder's own transforms with ``+`` works.

    Attributes:
        resolution: names, order, reasons and lock.
    """

    def __init__(self, stages: Iterable[Stage], session: Session) -> None:
        super().__init__(stages)
        self._session = session
        self.resolution: Resolution = session.resolution

    def __repr__(self) -> str:
        return f"Pipeline({self.resolution.text!r})"

    @property
    def names(self) -> tuple[str, ...]:
        """Plugin names in order."""
        return self._session.names

    @property
    def lock(self) -> Lock:
        """Names, versions, content hashes and options; compared between ranks and stored in checkpoints."""
        return self.resolution.lock

    def plugin(self, name: str) -> Any:
        """The plugin instance of that name."""
        return self._session.plugin(name)

    def observe(self, *observers: object) -> Pipeline:
        """Register observers: objects whose ``@hookimpl(wrapper=True)`` methods surround every plugin's hooks."""
        for observer in observers:
            self._session.observe(observer)
        return self


def build(resolution: Resolution, members: Sequence[tuple[Step, Any]], *, verify: bool = True) -> Pipeline:
    """Make the pipeline for a resolution.

    Args:
        resolution: what was resolved.
        members: its steps that have code, each with its plugin instance, in order.
        verify: check traces and declared effects after every plugin (cheap next to tracing).
    """
    session = Session(resolution, members, verify)
    return Pipeline([Stage(session, index) for index in range(len(members))], session)
