"""Order a set of steps by stages, declared edges, and a canonical tie-break; explain and refute orders."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from thunder_xform.errors import CycleError, spell
from thunder_xform.manifest import STAGES
from thunder_xform.registry.step import Step

__all__ = ["Edge", "Graph"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One reason for one plugin to run before another."""

    first: str
    then: str
    #: ``stage``, ``declared`` (by a manifest) or ``user`` (by the call).
    kind: str
    #: Who says so: distribution, version and field.
    source: str

    def __str__(self) -> str:
        return f"{self.first!r} runs before {self.then!r} [{self.source}]"


class Graph:
    """The edges between the steps of one pipeline.

    With n plugins there are at most n*n stage edges; pipelines are short, and uniform edges keep `path` and
    the cycle search free of special cases.
    """

    def __init__(self, steps: Iterable[Step], user_edges: Sequence[tuple[str, str]] = ()) -> None:
        self._steps = {step.name: step for step in sorted(steps, key=_rank)}
        self._edges: dict[str, dict[str, Edge]] = {name: {} for name in self._steps}
        # The first edge between two steps is kept: what somebody wrote explains more than the stages do.
        for edge in (*self._user(user_edges), *self._declared(), *self._staged()):
            self._edges[edge.first].setdefault(edge.then, edge)

    def order(self) -> tuple[str, ...]:
        """The steps' names, earliest first.

        Ties are broken by stage, name and distribution, so that the result depends on the set of steps alone:
        not on the order of the request, of installation, of ``sys.path``, nor on PYTHONHASHSEED.

        Raises:
            CycleError: naming a shortest cycle and who declares each of its edges.
        """
        waiting = dict.fromkeys(self._steps, 0)
        for successors in self._edges.values():
            for name in successors:
                waiting[name] += 1
        ready = [(_rank(self._steps[name]), name) for name, count in waiting.items() if not count]
        heapq.heapify(ready)
        order: list[str] = []
        while ready:
            _, name = heapq.heappop(ready)
            order.append(name)
            for successor in self._edges[name]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    heapq.heappush(ready, (_rank(self._steps[successor]), successor))
        if len(order) < len(self._steps):
            raise self._cycle()
        return tuple(order)

    def path(self, first: str, then: str) -> tuple[Edge, ...]:
        """A shortest chain of edges from `first` to `then`; empty where nothing orders them that way."""
        arrived: dict[str, Edge] = {}
        queue = deque([first])
        while queue and then not in arrived:
            name = queue.popleft()
            for successor, edge in sorted(self._edges[name].items()):
                if successor not in arrived:
                    arrived[successor] = edge
                    queue.append(successor)
        if then not in arrived:
            return ()
        chain = [arrived[then]]
        while chain[0].first != first:
            chain.insert(0, arrived[chain[0].first])
        return tuple(chain)

    def _user(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Edge]:
        for pair in pairs:
            firsts, thens = (self._matching(pattern) for pattern in pair)
            if pair[0] == pair[1] or (firsts == thens and len(firsts) == 1):
                name = firsts[0] if firsts else pair[0]
                raise CycleError(
                    f"the order of {name} contradicts itself: {name!r} runs before {name!r} [edges=[{pair!r}]].",
                    "Give an edge two different plugins.",
                    cycle=(name,),
                    edges=(f"edges=[{pair!r}]",),
                )
            yield from (Edge(a, b, "user", f"edges=[{pair!r}]") for a in firsts for b in thens if a != b)

    def _declared(self) -> Iterator[Edge]:
        for name, step in self._steps.items():
            for pattern in step.manifest.after:
                source = f"{step.origin}: after = [{pattern!r}]"
                yield from (Edge(other, name, "declared", source) for other in self._matching(pattern) if other != name)
            for pattern in step.manifest.before:
                source = f"{step.origin}: before = [{pattern!r}]"
                yield from (Edge(name, other, "declared", source) for other in self._matching(pattern) if other != name)

    def _staged(self) -> Iterator[Edge]:
        for a in self._steps.values():
            for b in self._steps.values():
                if _rank(a)[0] < _rank(b)[0]:
                    source = f"{a.origin}: stage = {a.manifest.stage!r}; {b.origin}: stage = {b.manifest.stage!r}"
                    yield Edge(a.name, b.name, "stage", source)

    def _matching(self, pattern: str) -> list[str]:
        return [name for name, step in self._steps.items() if step.manifest.matches(pattern)]

    def _cycle(self) -> CycleError:
        cycles = (self.path(name, name) for name in self._steps)
        cycle = min(filter(None, cycles), key=len)
        names = tuple(edge.first for edge in cycle)
        culprit = "your `edges`" if any(edge.kind == "user" for edge in cycle) else "these declarations"
        return CycleError(
            f"the order of {spell(sorted(names))} contradicts itself: {spell(map(str, cycle))}.",
            f"Drop one of them from the request, or one of {culprit}.",
            cycle=names,
            edges=tuple(map(str, cycle)),
        )


def _rank(step: Step) -> tuple[int, str, str]:
    return STAGES.index(step.manifest.stage or STAGES[0]), step.name, step.distribution
