"""Which plugins a request brings in: what it names, what those require, and what they want and is there."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import cached_property

from thunder_xform.errors import MissingRequirementError, XformError, spell
from thunder_xform.manifest import Manifest
from thunder_xform.registry._advice import installation
from thunder_xform.registry._catalog import Catalog
from thunder_xform.registry._index import Index
from thunder_xform.registry._record import Record

__all__ = ["Selection"]


class Selection:
    """The closed set of plugins and bundles; the outcome does not depend on the order of `names`.

    Raises:
        UnknownNameError, DeniedError, ...: a requested name is not usable.
        MissingRequirementError: a requirement has no usable provider, or several.
    """

    def __init__(self, names: Iterable[str], catalog: Catalog) -> None:
        self._catalog = catalog
        self._chosen: dict[str, tuple[Record, Manifest]] = {}
        self._index = Index()
        self._required: list[tuple[str, str]] = []
        self._wanted: list[tuple[str, str]] = []
        self._unattainable: list[tuple[str, str]] = []
        self._requested = frozenset(names)
        for name in sorted(self._requested):
            self._add(name)
        self._close()
        while wanted := self._next_wanted():
            self._add(wanted)
            self._close()

    @property
    def plugins(self) -> dict[str, tuple[Record, Manifest]]:
        """The steps to be, by sorted name."""
        return {name: entry for name, entry in sorted(self._chosen.items()) if not entry[1].is_bundle}

    @property
    def bundles(self) -> dict[str, tuple[Record, Manifest]]:
        """The bundles that were replaced by what they require, by sorted name."""
        return {name: entry for name, entry in sorted(self._chosen.items()) if entry[1].is_bundle}

    def reason(self, name: str) -> str:
        """``requested``, ``required by X`` or ``wanted by X``."""
        if name in self._requested:
            return "requested"
        return self._reasons[name]

    @cached_property
    def _reasons(self) -> dict[str, str]:
        """Who brought each plugin in: what requires it goes before what wants it, then by name."""
        reasons: dict[str, str] = {}
        for field, verb in (("requires", "required"), ("wants", "wanted")):
            for other, (_, manifest) in sorted(self._chosen.items()):
                for name in (name for pattern in getattr(manifest, field) for name in self._index.names(pattern)):
                    if name != other:
                        reasons.setdefault(name, f"{verb} by {other}")
        return reasons

    def _add(self, name: str) -> None:
        if name not in self._chosen:
            _, manifest = self._chosen[name] = self._catalog.get(name)
            self._index.add(manifest)
            self._required += ((name, pattern) for pattern in manifest.requires)
            self._wanted += ((name, pattern) for pattern in manifest.wants)

    def _close(self) -> None:
        """Pull in requirements until none is missing: names first, then capabilities with one provider."""
        undecided: list[tuple[str, str]] = []
        # Several can meet these, or none can; that changes by being met alone.
        open_choices: list[tuple[str, str]] = []
        while self._required or undecided:
            while self._required:
                entry = self._required.pop()
                if self._sources(entry[1]) == (entry[1],):
                    self._add(entry[1])
                else:
                    heapq.heappush(undecided, entry)
            if undecided and not self._met(*(entry := heapq.heappop(undecided))):
                if len(sources := self._sources(entry[1])) == 1:
                    self._add(sources[0])
                else:
                    open_choices.append(entry)
        for entry in sorted(open_choices):
            if not self._met(*entry):
                raise self._unmet(*entry)

    def _sources(self, pattern: str) -> tuple[str, ...]:
        """The plugins that could be pulled in to meet `pattern`: the one so named, or all that provide it."""
        found = (pattern,) if self._catalog.find(pattern) else self._catalog.matching(pattern)
        return tuple(name for name in found if name not in self._chosen and self._catalog.usable(name))

    def _met(self, name: str, pattern: str) -> bool:
        """Whether something chosen other than the plugin `name` matches `pattern`."""
        return any(other != name for other in self._index.names(pattern)[:2])

    def _next_wanted(self) -> str | None:
        # What could not be had may be had now that more is chosen.
        self._wanted += self._unattainable
        self._unattainable = []
        heapq.heapify(self._wanted)
        while self._wanted:
            entry = heapq.heappop(self._wanted)
            if self._met(*entry):
                continue
            found = self._sources(entry[1])
            if len(found) == 1 and self._attainable(found[0]):
                return found[0]
            self._unattainable.append(entry)
        return None

    def _attainable(self, name: str) -> bool:
        """Whether `name` and all it requires could be pulled in."""
        pending, seen = [name], {name}
        while pending:
            for pattern in self._catalog.get(pending.pop())[1].requires:
                if self._index.names(pattern):
                    continue
                found = self._sources(pattern)
                if len(found) != 1:
                    return False
                if found[0] not in seen:
                    seen.add(found[0])
                    pending.append(found[0])
        return True

    def _unmet(self, name: str, pattern: str) -> XformError:
        record = self._chosen[name][0]
        what = f"{name!r} requires {pattern!r} [{record.origin}: requires]"
        unusable = self._catalog.find(pattern)
        candidates = self._sources(pattern)
        cause = unusable.error if unusable else None
        if cause is not None:
            problem, remedy = f"{what}, which cannot be used: {cause.problem}", cause.remedy
        elif candidates:
            problem = f"{what}, which {spell(candidates)} provide."
            remedy = f"Add the one you want to the request: {spell(candidates, 'or')}."
        elif "." in pattern:
            problem, remedy = (
                f"{what}, which no other installed plugin provides.",
                "Install a plugin that provides it.",
            )
        else:
            hint, how = installation(pattern, self._catalog.names)
            if hint or not how:
                how = f"Install what provides it, or report it to the author of {record.distribution}."
            problem, remedy = f"{what}, which is not installed.{hint}", how
        return MissingRequirementError(
            problem,
            remedy,
            plugin=name,
            distribution=record.distribution,
            requirement=pattern,
            candidates=candidates,
        )
