"""The prologue as plugins extend it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from thunder.core.trace import TraceCtx

from thunder_xform.errors import PipelineError
from thunder_xform.host.guards import with_check
from thunder_xform.host.unpacking import without_checks


class Prologue:
    """Immutable view of the prologue: unpacking and checks that decide whether a compiled entry fits a call."""

    def __init__(self, trace: TraceCtx, roots: Collection[str] | None = None) -> None:
        self._trace = trace
        self._roots = roots

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
        return Prologue(with_check(self._trace, f"check_{name}", holds), self._roots)

    def trust(self, names: Iterable[str]) -> Prologue:
        """Remove the checks of parameters' and buffers' shapes, dtypes, devices and ``requires_grad``, for all plugins.

        Each costs a little in every call. Without them a tensor that was replaced by another kind of one, or whose
        ``requires_grad`` was flipped, meets code that was compiled for what it was.

        Args:
            names: of parameters and buffers, tied ones by their first name; what the trace does not read is left out.
        """
        return Prologue(without_checks(self._trace, frozenset(names), self._roots), self._roots)
