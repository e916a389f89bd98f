"""What happened in each compilation, and why it was needed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from thunder_xform.host.conditions import differing


@dataclass(slots=True)
class CompileEvent:
    """One compilation of the model.

    Attributes:
        number: 0 for the first.
        reasons: why compiled code did not fit, one phrase each.
        key: the guard key compiled under, by contributor.
        conditions: what else the compiled code takes for granted (inputs, parameters, attributes of modules).
        check: what the comparison with eager PyTorch found; empty without one.
        seconds: time spent in each ``plugin.hook``, in seconds, in the order in which they ran.
    """

    number: int
    reasons: tuple[str, ...]
    key: Mapping[str, Hashable]
    conditions: Mapping[str, str] = field(default_factory=dict, repr=False)
    seconds: dict[str, float] = field(default_factory=dict)
    check: str = ""


def reasons(
    key: Mapping[str, Hashable],
    conditions: Mapping[str, str],
    held: Sequence[CompileEvent],
    first: str = "first call",
) -> tuple[str, ...]:
    """Why code for ``key`` and ``conditions`` has to be compiled: how it differs from the nearest there is.

    Args:
        key: guard key by contributor.
        conditions: what else the new code takes for granted.
        held: compilations whose code is still there.
        first: the reason if there are none.
    """
    if not held:
        return (first,)

    def changed(event: CompileEvent) -> tuple[str, ...]:
        return tuple(
            f"guard key of {name!r}: {event.key.get(name)!r} -> {value!r}"
            for name, value in key.items()
            if event.key.get(name) != value
        )

    def others(event: CompileEvent) -> tuple[str, ...]:
        return differing(event.conditions, conditions)

    nearest = min(reversed(held), key=lambda event: (len(changed(event)), len(others(event))))
    return changed(nearest) or others(nearest) or ("compiled code was dropped, or inputs are not cached",)
