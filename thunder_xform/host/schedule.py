"""Optimized forward and backward traces, as plugins reorder them in ``after_optimization``."""

from __future__ import annotations

from thunder.core import prims
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag, from_trace
from thunder.executors.passes import del_last_used
from thunder.executors.pythonex import clear_mutable_collection

from thunder_xform.errors import PipelineError
from thunder_xform.host.operators import Operator, operator_of

#: Written, like deletions, by Thunder's own liveness pass, which runs again after a reordering.
_CLEAR = clear_mutable_collection


class Schedule:
    """Immutable view of an optimized trace. Edits change the order of operators, never what they compute.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
    """

    def __init__(self, trace: TraceCtx) -> None:
        self._trace = trace
        self.phase = "backward" if TraceTag.BACKWARD in trace.tags else "forward"

    def __str__(self) -> str:
        return str(self._trace)

    def names(self) -> list[str]:
        """Operator names in order, without deletions and unpacking."""
        return [b.sym.name for b in self._body()]

    def count(self, operator: Operator) -> int:
        """How many calls of a project operator the trace has."""
        return sum(operator_of(b.sym) is operator for b in self._trace.bound_symbols)

    def sink(self, operator: Operator) -> Schedule:
        """Move every call of ``operator`` down to right before the first use of its results."""
        body = self._body()
        calls = [b for b in body if operator_of(b.sym) is operator]
        if not calls:
            return self
        rest = [b for b in body if operator_of(b.sym) is not operator]
        waiting = {o.name: call for call in calls for o in call.flat_proxy_outs}
        placed: set[int] = set()
        order: list[BoundSymbol] = []

        def place(bsym: BoundSymbol) -> None:
            for argument in bsym.flat_proxy_args:
                call = waiting.get(argument.name)
                if call is not None and id(call) not in placed:
                    placed.add(id(call))
                    place(call)
                    order.append(call)

        for bsym in rest:
            place(bsym)
            order.append(bsym)
        unused = [c for c in calls if id(c) not in placed]
        return self._reordered([*order[:-1], *unused, order[-1]])

    def _body(self) -> list[BoundSymbol]:
        return [b for b in self._trace.bound_symbols if b.sym.id != prims.PrimIDs.DEL and b.sym != _CLEAR]

    def _reordered(self, body: list[BoundSymbol]) -> Schedule:
        _check_order(body)
        new = from_trace(self._trace)
        new.bound_symbols = body
        return Schedule(del_last_used(new, clear_mutable_collections=self.phase == "backward"))


def _check_order(body: list[BoundSymbol]) -> None:
    produced: set[str] = set()
    known = {o.name for b in body for o in b.flat_proxy_outs}
    for bsym in body:
        for argument in bsym.flat_proxy_args:
            if argument.name in known and argument.name not in produced and argument not in bsym.flat_proxy_outs:
                raise PipelineError(
                    f"Operator {bsym.sym.name!r} would run before {argument.name!r}, which it reads, is produced.",
                    "Move an operator only within the bounds of its inputs and uses.",
                )
        produced.update(o.name for o in bsym.flat_proxy_outs)

