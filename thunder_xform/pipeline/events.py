"""What happened in each compilation, and why it was needed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class CompileEvent:
    """One compilation of the model.

    Attributes:
        number: 0 for the first.
        reasons: why compiled code did not fit, one phrase each.
        key: the guard key compiled under, by contributor.
        seconds: time spent in each ``plugin.hook``, in seconds, in the order in which they ran.
    """

    number: int
    reasons: tuple[str, ...]
    key: Mapping[str, Hashable]
    seconds: dict[str, float] = field(default_factory=dict)


def reasons(key: Mapping[str, Hashable], past: list[CompileEvent]) -> tuple[str, ...]:
    """Why ``key`` needs a compilation after those in ``past``: against the one that it differs least from."""
    if not past:
        return ("first call",)

    def differing(event: CompileEvent) -> list[str]:
        return [name for name, value in key.items() if event.key.get(name) != value]

    nearest = min(reversed(past), key=lambda event: len(differing(event)))
    changed = differing(nearest)
    if not changed:
        return ("inputs, parameters or modules differ from those compiled for (no guard key changed)",)
    return tuple(f"guard key of {name!r}: {nearest.key.get(name)!r} -> {key[name]!r}" for name in changed)
