"""What may not be together in one pipeline, and what may not be left without an order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from thunder_xform.errors import ConflictError, UnorderedEffectsError, spell
from thunder_xform.manifest import Effects
from thunder_xform.registry._order import Graph
from thunder_xform.registry._request import same
from thunder_xform.registry.step import Step

__all__ = ["check_conflicts", "check_effects", "check_exclusive"]


def check_conflicts(steps: Sequence[Step]) -> None:
    """Raise `ConflictError` if a step's ``conflicts`` matches another one."""
    for step in steps:
        for other in steps:
            for pattern in step.manifest.conflicts if other is not step else ():
                if other.manifest.matches(pattern):
                    claims = [f"{step.origin}: conflicts = [{pattern!r}]"]
                    if pattern != other.name:
                        claims.append(f"{other.origin}: provides = {_provided(other, pattern)}")
                    raise ConflictError(
                        f"{step.name!r} and {other.name!r} exclude each other [{'; '.join(claims)}].",
                        _drop_one(step, other),
                        names=(step.name, other.name),
                        claims=tuple(claims),
                    )


def check_exclusive(steps: Sequence[Step]) -> None:
    """Raise `ConflictError` if two steps occupy one resource: the options that identify it are equal."""
    for a, b in combinations(steps, 2):
        for resource in sorted(a.manifest.exclusive.keys() & b.manifest.exclusive.keys()):
            options_a, options_b = a.manifest.exclusive[resource], b.manifest.exclusive[resource]
            values_a, values_b = [*map(a.option, options_a)], [*map(b.option, options_b)]
            if len(values_a) == len(values_b) and all(map(same, values_a, values_b)):
                claims = tuple(
                    f"{step.origin}: exclusive = {{{resource!r} = {list(options)!r}}}"
                    for step, options in ((a, options_a), (b, options_b))
                )
                settings = ", ".join(f"{name} = {value!r}" for name, value in zip(options_a, values_a, strict=True))
                with_settings = f" with the same {settings}" if settings else ""
                remedy = _drop_one(a, b)
                if options_a or options_b:
                    names = spell(sorted({*options_a, *options_b}), "or")
                    remedy = f"Give them different values of {names}, or leave one of them out."
                both = f"{a.name!r} and {b.name!r} both occupy"
                raise ConflictError(
                    f"{both} {resource!r}{with_settings} [{'; '.join(claims)}].",
                    remedy,
                    names=(a.name, b.name),
                    claims=claims,
                )


def check_effects(steps: Sequence[Step], graph: Graph) -> None:
    """Raise `UnorderedEffectsError` if effects clash that no stage, edge or ``commutes`` claim settles."""
    for a, b in combinations(steps, 2):
        clashes = tuple(_clashes(a.manifest.effects, b.manifest.effects))
        if not clashes or _commute(a, b) or graph.path(a.name, b.name) or graph.path(b.name, a.name):
            continue
        shown = (
            f"{step.name!r} {verb} {state!r} [{step.origin}: effects.{verb}]"
            for step, (verb, state) in zip((a, b), clashes[0], strict=True)
        )
        raise UnorderedEffectsError(
            f"nothing orders {a.name!r} and {b.name!r}, although {spell(shown)}.",
            f"Say which comes first, for example edges=[({a.name!r}, {b.name!r})]; their authors can "
            "settle it with `after`, `before` or `commutes`.",
            names=(a.name, b.name),
            effects=tuple((ea, eb) for (_, ea), (_, eb) in clashes),
        )


def _clashes(a: Effects, b: Effects) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Pairs of ``(verb, state)`` of which at least one writes and one contains the other."""
    for verb_a, verb_b in (("writes", "writes"), ("writes", "reads"), ("reads", "writes")):
        for state_a in sorted(getattr(a, verb_a)):
            for state_b in sorted(getattr(b, verb_b)):
                if f"{state_a}.".startswith(f"{state_b}.") or f"{state_b}.".startswith(f"{state_a}."):
                    yield (verb_a, state_a), (verb_b, state_b)


def _commute(a: Step, b: Step) -> bool:
    return any(map(b.manifest.matches, a.manifest.commutes)) or any(map(a.manifest.matches, b.manifest.commutes))


def _provided(step: Step, pattern: str) -> list[str]:
    return [c for c in step.manifest.provides if c == pattern or c.startswith(pattern.removesuffix("*"))]


def _drop_one(*steps: Step) -> str:
    named = spell((f"{step.name!r} ({step.reason})" for step in steps), "or")
    pulled = any(step.reason.startswith("wanted") for step in steps)
    return f"Leave out {named}{', for example with deny=[...]' if pulled else ''}."
