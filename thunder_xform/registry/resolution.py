"""The outcome of planning: pure data that explains itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from thunder_xform.errors import DuplicateRequestError, UnknownNameError, closest, spell
from thunder_xform.registry._order import Edge, Graph
from thunder_xform.registry._text import render
from thunder_xform.registry.lock import Lock
from thunder_xform.registry.step import Step

__all__ = ["Explanation", "Resolution"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why `first` runs before `then`: the edges between them; none where only the tie-break decides."""

    first: str
    then: str
    edges: tuple[Edge, ...]

    def __str__(self) -> str:
        if not self.edges:
            return f"{self.first!r} runs before {self.then!r} by name alone: no stage or edge orders them."
        head = f"{self.first!r} runs before {self.then!r}:\n" if len(self.edges) > 1 else ""
        return head + "\n".join(f"  {edge}" if head else str(edge) for edge in self.edges)


@dataclass(frozen=True)
class Resolution:
    """An ordered, explained pipeline; no code of its plugins has been imported to make it."""

    #: The plugins, in the order in which they run.
    steps: tuple[Step, ...]
    #: Order that the caller added, as pairs of names or capabilities.
    edges: tuple[tuple[str, str], ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        """The names, in the order in which the plugins run."""
        return tuple(step.name for step in self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def why(self, a: str, b: str) -> Explanation:
        """The shortest chain of reasons for the order of `a` and `b`.

        Raises:
            DuplicateRequestError: they are one.
            UnknownNameError: one of them is not in the pipeline.
        """
        refuse_twice(a, b)
        for name in (a, b):
            if name not in self._position:
                raise UnknownNameError(
                    f"{name!r} is not in this pipeline.{closest(name, self.order)}",
                    f"It consists of {spell(self.order)}." if self.order else "It is empty.",
                    name=name,
                    known=self.order,
                )
        first, then = sorted((a, b), key=self._position.__getitem__)
        return Explanation(first, then, self._graph.path(first, then))

    @cached_property
    def _graph(self) -> Graph:
        return Graph(self.steps, self.edges)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.order)}

    @cached_property
    def lock(self) -> Lock:
        """Names, versions, content hashes, options and host versions; read when first asked for."""
        return Lock.of(self.steps)

    @property
    def text(self) -> str:
        """The pipeline as a request in text form, ``lora(r=8) + fsdp(zero=3)``, in its order."""
        return render((step.name, step.options) for step in self.steps)


def refuse_twice(a: str, b: str) -> None:
    """Raise `DuplicateRequestError` if the order of a plugin and itself is asked for."""
    if a == b:
        raise DuplicateRequestError(
            f"{a!r} is named twice, but nothing runs before itself.", "Name two plugins.", name=a, option=""
        )
