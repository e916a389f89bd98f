"""Which plugins a request brings in: what it names, what those require, and what they want and is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from thunder_xform.errors import MissingRequirementError, XformError, spell
from thunder_xform.manifest import Manifest
from thunder_xform.registry._advice import installation
from thunder_xform.registry._catalog import Catalog
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
        manifest = self._chosen[name][1]
        for field, verb in (("requires", "required"), ("wants", "wanted")):
            for other, (_, declaring) in sorted(self._chosen.items()):
                if other != name and any(map(manifest.matches, getattr(declaring, field))):
                    return f"{verb} by {other}"
        raise AssertionError(name)

    def _add(self, name: str) -> None:
        if name not in self._chosen:
            self._chosen[name] = self._catalog.get(name)

    def _close(self) -> None:
        """Pull in requirements until none is missing: names first, then capabilities with one provider."""
        while missing := list(self._missing("requires")):
            named = [pattern for _, pattern in missing if self._sources(pattern) == (pattern,)]
            single = [found[0] for _, pattern in missing if len(found := self._sources(pattern)) == 1]
            if not single:
                raise self._unmet(*missing[0])
            for name in named or single[:1]:
                self._add(name)

    def _sources(self, pattern: str) -> tuple[str, ...]:
        """The plugins that could be pulled in to meet `pattern`: the one so named, or all that provide it."""
        found = (pattern,) if self._catalog.find(pattern) else self._catalog.matching(pattern)
        return tuple(name for name in found if name not in self._chosen and self._catalog.usable(name))

    def _missing(self, field: str) -> Iterator[tuple[str, str]]:
        """The ``(plugin, pattern)`` pairs that nothing else chosen meets, in canonical order."""
        for name, (_, manifest) in sorted(self._chosen.items()):
            for pattern in sorted(getattr(manifest, field)):
                if not any(other != name and m.matches(pattern) for other, (_, m) in self._chosen.items()):
                    yield name, pattern

    def _next_wanted(self) -> str | None:
        for _, pattern in self._missing("wants"):
            found = self._sources(pattern)
            if len(found) == 1 and self._attainable(found[0], set()):
                return found[0]
        return None

    def _attainable(self, name: str, seen: set[str]) -> bool:
        """Whether `name` and all it requires could be pulled in."""
        if name in self._chosen or name in seen:
            return True
        seen.add(name)
        for pattern in self._catalog.get(name)[1].requires:
            if any(m.matches(pattern) for _, m in self._chosen.values()):
                continue
            found = self._sources(pattern)
            if len(found) != 1 or not self._attainable(found[0], seen):
                return False
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
