"""The prologue as plugins extend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from thunder.core.trace import TraceCtx

from thunder_xform.errors import PipelineError
from thunder_xform.host.guards import with_check


class Prologue:
    """Immutable view of the prologue: unpacking and checks that decide whether a compiled entry fits a call."""

    def __init__(self, trace: TraceCtx) -> None:
        self._trace = trace

    def __str__(self) -> str:
        return str(self._trace)

    def checks(self) -> Iterator[str]:
        """Names of the checks, in order."""
        return (b.sym.name for b in self._trace.bound_symbols if b.sym.name.startswith("check_"))

    def check(self, name: str, holds: Callable[[], bool]) -> Prologue:
        """Add a condition that is evaluated on every call; where it is false, this compiled entry is skipped.

        Args:
            name: a valid identifier, printed in the trace; ``check_`` is put before it.
            holds: the condition.

        Raises:
            PipelineError: the condition is false now, so the code being compiled could never run.
        """
        if not holds():
            raise PipelineError(
                f"The check {name!r} fails in the very compilation that it is added to.",
                "Add conditions under which the code being compiled is valid.",
                name=name,
            )
        return Prologue(with_check(self._trace, f"check_{name}", holds))
