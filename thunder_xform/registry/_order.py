"""Order a set of steps by stages, declared edges, and a canonical tie-break; explain and refute orders."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from thunder_xform.errors import CycleError, spell
from thunder_xform.manifest import STAGES
from thunder_xform.registry._index import Index
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
    """The order between the steps of one pipeline: the edges that somebody wrote, and the stages, which need none."""

    def __init__(self, steps: Iterable[Step], user_edges: Sequence[tuple[str, str]] = ()) -> None:
        self._steps = {step.name: step for step in sorted(steps, key=_rank)}
        self._index = Index(step.manifest for step in self._steps.values())
        self._edges: dict[str, dict[str, Edge]] = {name: {} for name in self._steps}
        # The first edge between two steps is kept.
        for edge in (*self._user(user_edges), *self._declared()):
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
        order: list[str] = []
        for names in self._stages():
            ready = [(_rank(self._steps[name]), name) for name in names if not waiting[name]]
            heapq.heapify(ready)
            done = 0
            while ready:
                _, name = heapq.heappop(ready)
                order.append(name)
                done += 1
                for successor in self._edges[name]:
                    waiting[successor] -= 1
                    if not waiting[successor] and self._stage(successor) == self._stage(name):
                        heapq.heappush(ready, (_rank(self._steps[successor]), successor))
            if done < len(names):
                raise self._cycle()
        return tuple(order)

    def path(self, first: str, then: str) -> tuple[Edge, ...]:
        """A shortest chain of edges from `first` to `then`, of a graph that has an order; empty where nothing does."""
        if edge := self._edges[first].get(then):
            return (edge,)
        if self._stage(first) < self._stage(then):
            return (self._staged(first, then),)
        return self._search(first, then, ())

    def _search(self, first: str, then: str, stages: Sequence[Sequence[str]]) -> tuple[Edge, ...]:
        """A shortest chain of edges that were written, and of those between `stages`."""
        unseen = dict(enumerate(stages))
        arrived: dict[str, Edge] = {}
        queue = deque([first])
        while queue and then not in arrived:
            name = queue.popleft()
            explicit = self._edges[name]
            # Everything in later stages follows; nothing of it is new a second time.
            later = [stage for stage in unseen if stage > self._stage(name)]
            staged = [n for stage in later for n in unseen.pop(stage)]
            for successor in sorted({*explicit, *staged}):
                if successor not in arrived:
                    arrived[successor] = explicit.get(successor) or self._staged(name, successor)
                    queue.append(successor)
        if then not in arrived:
            return ()
        chain = [arrived[then]]
        while chain[-1].first != first:
            chain.append(arrived[chain[-1].first])
        return tuple(reversed(chain))

    def unordered(self) -> dict[str, int]:
        """For each step the set of those that nothing orders it against: bit i is the i-th name in sorted order."""
        bits = {name: 1 << i for i, name in enumerate(sorted(self._steps))}
        settled = {name: bits[name] for name in self._steps}
        order = self.order()
        for sequence, edges in ((reversed(order), self._edges), (order, self._reversed())):
            reached: dict[str, int] = {}
            for name in sequence:
                reached[name] = 0
                for other in edges[name]:
                    reached[name] |= bits[other] | reached[other]
                settled[name] |= reached[name]
        stages = [sum(bits[name] for name in names) for names in self._stages()]
        return {name: stages[self._stage(name)] & ~settled[name] for name in self._steps}

    def _user(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Edge]:
        for pair in pairs:
            firsts, thens = (self._matching(pattern) for pattern in pair)
            if pair[0] == pair[1] or (list(firsts) == list(thens) and len(firsts) == 1):
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

    def _staged(self, a: str, b: str) -> Edge:
        first, then = self._steps[a], self._steps[b]
        source = f"{first.origin}: stage = {first.manifest.stage!r}; {then.origin}: stage = {then.manifest.stage!r}"
        return Edge(a, b, "stage", source)

    def _stage(self, name: str) -> int:
        return _rank(self._steps[name])[0]

    def _stages(self) -> list[list[str]]:
        """The names in each stage, in order."""
        stages: list[list[str]] = [[] for _ in STAGES]
        for name in self._steps:
            stages[self._stage(name)].append(name)
        return stages

    def _reversed(self) -> dict[str, list[str]]:
        predecessors: dict[str, list[str]] = {name: [] for name in self._steps}
        for name, successors in self._edges.items():
            for successor in successors:
                predecessors[successor].append(name)
        return predecessors

    def _matching(self, pattern: str) -> Sequence[str]:
        return self._index.names(pattern)

    def _cycle(self) -> CycleError:
        stages = self._stages()
        cycles = (self._search(name, name, stages) for name in self._steps)
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
