"""Optimized forward and backward traces, as plugins reorder them in ``after_optimization``."""

from __future__ import annotations

from thunder.core import prims
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag, from_trace
from thunder.executors.passes import del_last_used
from thunder.executors.pythonex import clear_mutable_collection

from thunder_xform.errors import PipelineError
from thunder_xform.host.operators import Operator, operator_of

_UNPACKS = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE)
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

    def delay(self, start: Operator, wait: Operator, *, in_flight: int | None = None) -> Schedule:
        """Move each call of ``wait`` down to right before the first use of its results.

        Args:
            start: the operator whose result each ``wait`` takes.
            wait: the operator to move.
            in_flight: how many starts may be without their wait at any time, as far as what the waits read besides is
                there; None for no limit.
        """
        body = self._body()
        pairs = self._pairs(body, start, wait)
        waiting = {id(w): w for _, w in pairs}
        moved = frozenset(waiting)
        started = {id(s): w for s, w in pairs}
        producers = {o.name: w for _, w in pairs for o in w.flat_proxy_outs}
        produced: set[str] = set()
        flying: list[BoundSymbol] = []
        order: list[BoundSymbol] = []

        def place(bsym: BoundSymbol) -> None:
            for argument in bsym.flat_proxy_args:
                if argument.name in producers:
                    land(producers[argument.name])
            order.append(bsym)
            produced.update(o.name for o in bsym.flat_proxy_outs)

        def land(call: BoundSymbol) -> None:
            if waiting.pop(id(call), None) is not None:
                place(call)

        for bsym in body:
            if id(bsym) in moved:
                continue
            if id(bsym) in started:
                flying = [w for w in flying if id(w) in waiting]
                if in_flight is not None:
                    ready = [w for w in flying if all(a.name in produced for a in w.flat_proxy_args)]
                    for call in ready[: max(0, len(flying) + 1 - in_flight)]:
                        land(call)
                flying.append(started[id(bsym)])
            if bsym.sym.id == prims.PrimIDs.RETURN:
                for call in list(waiting.values()):
                    land(call)
            place(bsym)
        return self._reordered(order)

    def prefetch(self, start: Operator, wait: Operator, *, ahead: int) -> Schedule:
        """Move each call of ``start`` up, to right after the ``wait`` that lies ``ahead`` waits before its own.

        What a start reads moves up with it as far as needed.

        Args:
            start: the operator to move; its result is what ``wait`` takes.
            wait: the operator that it is paired with.
            ahead: 0 starts right before its own wait.
        """
        body = self._body()
        pairs = self._pairs(body, start, wait)
        producers = {o.name: b for b in body for o in b.flat_proxy_outs if b.sym.id not in _UNPACKS}
        waits = {id(w): number for number, (_, w) in enumerate(pairs)}
        starts = {id(s) for s, _ in pairs}
        placed: set[int] = set()
        order: list[BoundSymbol] = []

        def place(bsym: BoundSymbol) -> None:
            if id(bsym) in placed:
                return
            placed.add(id(bsym))
            for argument in bsym.flat_proxy_args:
                producer = producers.get(argument.name)
                if producer is not None and producer is not bsym:
                    place(producer)
            order.append(bsym)

        head = next((i for i, b in enumerate(body) if b.sym.id not in _UNPACKS), len(body))
        order.extend(body[:head])
        placed.update(id(b) for b in body[:head])
        for s, _ in pairs[:ahead]:
            place(s)
        for bsym in body[head:]:
            if id(bsym) in starts or id(bsym) in placed:
                continue
            number = waits.get(id(bsym))
            place(bsym)
            if number is not None and ahead and number + ahead < len(pairs):
                place(pairs[number + ahead][0])
        return self._reordered(order)

    @staticmethod
    def _pairs(body: list[BoundSymbol], start: Operator, wait: Operator) -> list[tuple[BoundSymbol, BoundSymbol]]:
        """Calls of ``start`` and the ``wait`` that takes each one's result, in order of the waits."""
        made = {o.name: b for b in body if operator_of(b.sym) is start for o in b.flat_proxy_outs}
        pairs = []
        for bsym in body:
            if operator_of(bsym.sym) is wait:
                source = next((made[a.name] for a in bsym.flat_proxy_args if a.name in made), None)
                if source is not None:
                    pairs.append((source, bsym))
        return pairs

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
        made = {o.name for o in bsym.flat_proxy_outs}
        for name in {a.name for a in bsym.flat_proxy_args} & known - produced - made:
            raise PipelineError(
                f"Operator {bsym.sym.name!r} would run before {name!r}, which it reads, is produced.",
                "Move an operator only within the bounds of its inputs and uses.",
            )
        produced |= made
