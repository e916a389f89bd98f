"""What may not be together in one pipeline, and what may not be left without an order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from thunder_xform.errors import ConflictError, UnorderedEffectsError, spell
from thunder_xform.manifest import Effects
from thunder_xform.registry._index import Index
from thunder_xform.registry._order import Graph
from thunder_xform.registry._request import same
from thunder_xform.registry.step import Step

__all__ = ["check_conflicts", "check_effects", "check_exclusive"]


def check_conflicts(steps: Sequence[Step]) -> None:
    """Raise `ConflictError` if a step's ``conflicts`` matches another one."""
    index, named = Index(step.manifest for step in steps), {step.name: step for step in steps}
    for step in steps:
        found = [(name, pattern) for pattern in step.manifest.conflicts for name in index.names(pattern)]
        for name, pattern in sorted((name, pattern) for name, pattern in found if name != step.name)[:1]:
            other = named[name]
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
    holders: dict[str, list[int]] = {}
    for i, step in enumerate(steps):
        for resource in step.manifest.exclusive:
            holders.setdefault(resource, []).append(i)
    pairs = {pair for same_resource in holders.values() for pair in combinations(same_resource, 2)}
    for a, b in ((steps[i], steps[j]) for i, j in sorted(pairs)):
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
    ordered = sorted(steps, key=lambda step: step.name)
    touching, commuting, unordered = _touching(ordered), _commuting(ordered), graph.unordered()
    for i, a in enumerate(ordered):
        clashing = 0
        for verb, state in _touched(a):
            clashing |= touching("writes", state) | (touching("reads", state) if verb == "writes" else 0)
        # Of each pair the first is `a`.
        clashing = (clashing & unordered[a.name] & ~commuting[a.name]) >> (i + 1)
        if not clashing:
            continue
        b = ordered[i + (clashing & -clashing).bit_length()]
        clashes = tuple(_clashes(a.manifest.effects, b.manifest.effects))
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
                if _overlap(state_a, state_b):
                    yield (verb_a, state_a), (verb_b, state_b)


def _touched(step: Step) -> Iterator[tuple[str, str]]:
    return ((verb, state) for verb in ("reads", "writes") for state in getattr(step.manifest.effects, verb))


def _touching(steps: Sequence[Step]) -> Callable[[str, str], int]:
    """A function that gives the steps, as bits, that read or write a state, a part of it, or what it is a part of."""
    masks: dict[tuple[str, str], int] = {}
    for i, step in enumerate(steps):
        for touched in _touched(step):
            masks[touched] = masks.get(touched, 0) | 1 << i

    @functools.cache
    def touching(verb: str, state: str) -> int:
        mask = 0
        for (other_verb, other), bits in masks.items():
            if other_verb == verb and _overlap(state, other):
                mask |= bits
        return mask

    return touching


def _commuting(steps: Sequence[Step]) -> dict[str, int]:
    """For each step those, as bits, that it or they claim to commute with."""
    index, bits = Index(step.manifest for step in steps), {step.name: 1 << i for i, step in enumerate(steps)}
    claiming: dict[str, int] = {}
    for step in steps:
        for pattern in step.manifest.commutes:
            claiming[pattern] = claiming.get(pattern, 0) | bits[step.name]
    commuting = dict.fromkeys(bits, 0)
    matched = dict.fromkeys(claiming, 0)
    for pattern in claiming:
        for name in index.names(pattern):
            matched[pattern] |= bits[name]
            commuting[name] |= claiming[pattern]
    for step in steps:
        for pattern in step.manifest.commutes:
            commuting[step.name] |= matched[pattern]
    return commuting


def _overlap(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _provided(step: Step, pattern: str) -> list[str]:
    return [c for c in step.manifest.provides if c == pattern or c.startswith(pattern.removesuffix("*"))]


def _drop_one(*steps: Step) -> str:
    named = spell((f"{step.name!r} ({step.reason})" for step in steps), "or")
    pulled = any(step.reason.startswith("wanted") for step in steps)
    return f"Leave out {named}{', for example with deny=[...]' if pulled else ''}."
