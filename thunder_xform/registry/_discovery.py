"""The scan for installed plugins: entry points, then manifests; no plugin code is executed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from thunder_xform.errors import DiscoveryError, XformError, closest, printable
from thunder_xform.manifest import Manifest
from thunder_xform.registry._files import package_directories
from thunder_xform.registry._record import Record, normalize

if TYPE_CHECKING:
    from importlib_metadata import Distribution

__all__ = ["GROUP", "scan"]

#: The entry-point group in which distributions announce their manifests.
GROUP = "thunder_xform.plugins"

_SECTION = re.compile(r"^\s*\[([^\]\n]+)\]", re.MULTILINE)


def scan() -> tuple[Record, ...]:
    """A record for every plugin announced by an installed distribution, sorted by name, then distribution.

    Whatever is wrong with one distribution is kept in its own records and never spoils the others.
    """
    installed: dict[str, list[Distribution]] = defaultdict(list)
    for distribution in _announcing():
        try:
            name = distribution.metadata["Name"] or ""
        except Exception:
            name = ""
        installed[normalize(name)].append(distribution)
    records = [
        record
        for name, copies in installed.items()
        for record in (_contained(copies) if name else map(_nameless, copies))
    ]
    return tuple(sorted(records, key=lambda record: (record.name, normalize(record.distribution), record.version)))


def _contained(copies: list[Distribution]) -> list[Record]:
    """`_records`; one broken record where finding them fails in a way that nobody thought of."""
    try:
        return _records(copies)
    except Exception as cause:
        name, version = _identity(copies[0])
        problem = f"its metadata or manifest cannot be read ({type(cause).__name__}: {cause})"
        return [_unreadable(name, version, problem)]


def _unreadable(name: str, version: str, problem: str) -> Record:
    """The one record of a distribution of which no plugin's name can be learnt."""
    error = DiscoveryError(
        f"{name} {version}: {problem}.",
        f"Reinstall it, or report it to its author: pip install --force-reinstall {name}",
        distribution=name,
        version=version,
    )
    return Record(name=name, distribution=name, version=version, error=error)


def _announcing() -> Iterator[Distribution]:
    """The distributions with the group or one like it; a look at the raw text spares all the others the parser."""
    import importlib_metadata

    for distribution in importlib_metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
        except (OSError, UnicodeDecodeError):
            continue
        if text and any(group == GROUP or is_misspelt(group) for group in _SECTION.findall(text)):
            yield cast("Distribution", distribution)


def is_misspelt(group: str) -> bool:
    """Whether the name of an entry-point group is probably meant to be `GROUP`."""
    if group == GROUP or abs(len(group) - len(GROUP)) > 3:
        return False
    import difflib

    return difflib.SequenceMatcher(None, group.lower(), GROUP).ratio() > 0.88


def _records(copies: list[Distribution]) -> list[Record]:
    """The records of one distribution; `copies` are its installations, in the order of ``sys.path``."""
    first = copies[0]
    name, version = _identity(first)
    places = {(copy.version, str(copy.locate_file(""))) for copy in copies}
    stale = sorted(v for v, place in places if place == str(first.locate_file("")))
    shadowed = tuple(sorted(printable(f"{v} in {place}") for v, place in places if place != str(first.locate_file(""))))
    if len(stale) > 1:
        error = DiscoveryError(
            f"{name} is installed in versions {printable(' and '.join(stale))} at once, in one directory.",
            f"Reinstall it: pip install --force-reinstall {name}",
            distribution=name,
            version=printable(" and ".join(stale)),
        )
        names = sorted({printable(point.name) for copy in copies for point in _entry_points(copy)} or {name})
        return [Record(name=n, distribution=name, version=error.version, error=error) for n in names]
    try:
        points = list(_entry_points(first))
    except Exception:
        points = []
    misspelt = list(_misspelt(first, name, version, {point.name for point in points}))
    if not points and not misspelt:
        problem = f"the group {GROUP} of its entry_points.txt contains nothing that can be read"
        return [_unreadable(name, version, problem)]
    return [*(replace(_record(p.name, p.value, name, version), shadowed=shadowed) for p in points), *misspelt]


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Name and version, for messages: no control character in them reaches a terminal."""
    return printable(str(distribution.metadata["Name"])), printable(str(distribution.version or "?"))


def _entry_points(distribution: Distribution) -> Iterator[Any]:
    return (point for point in distribution.entry_points if point.group == GROUP)


def _misspelt(distribution: Distribution, name: str, version: str, announced: set[str]) -> Iterator[Record]:
    """A broken record for each plugin that is announced in a group like `GROUP` alone."""
    try:
        points = list(distribution.entry_points)
    except Exception:
        points = []
    for point in points:
        if is_misspelt(point.group) and point.name not in announced:
            record = Record(name=printable(point.name), distribution=name, version=version, entry_point=point.value)
            problem = f"it is announced in the group {point.group!r}, which nothing reads"
            yield replace(record, error=_fault(record, problem, f"Call the group {GROUP!r}, and reinstall it"))


def _record(name: str, value: str, distribution: str, version: str) -> Record:
    package, _, filename = (part.strip() for part in value.partition(":"))
    directories = package_directories(package)
    record = Record(name=printable(name), distribution=distribution, version=version, entry_point=value)
    meant = name
    try:
        path = _manifest_path(record, package, filename, directories)
        manifest = Manifest.read(path, file=f"{package}/{filename}", distribution=record.origin)
        if (meant := manifest.name) != name:
            raise _fault(
                record,
                f"its name differs from `name` in {package}/{filename}, which is {manifest.name!r}",
                "Give both the same name",
            )
    except XformError as error:
        return replace(record, error=error, meant=meant)
    return replace(record, manifest=manifest, packages=_packages(package, manifest))


def _manifest_path(record: Record, package: str, filename: str, directories: tuple[Path, ...]) -> Path:
    if not filename:
        remedy = 'Write it as "package:manifest.toml"'
        raise _fault(record, f"the entry point {record.entry_point!r} names no manifest", remedy)
    if not directories:
        remedy = f"Reinstall it: pip install --force-reinstall {record.distribution}"
        raise _fault(record, f"the package {package!r} is not importable", remedy)
    for directory in directories:
        if (path := directory / filename).is_file():
            if ".." in Path(filename).parts or not path.resolve().is_relative_to(directory.resolve()):
                problem = f"the manifest {filename!r} lies outside of the package {package!r}"
                raise _fault(record, problem, "Ship it as a file of the package")
            return path
    hint = closest(filename, (path.name for directory in directories for path in directory.glob("*.toml")))
    raise _fault(
        record,
        f"the package {package!r} contains no file {filename!r}",
        f"{hint} Ship the manifest as package data, or reinstall the distribution".lstrip(),
    )


def _fault(record: Record, problem: str, remedy: str) -> DiscoveryError:
    return DiscoveryError(
        f"{record.origin}, entry point {record.name!r}: {problem}.",
        f"{remedy}.",
        distribution=record.distribution,
        version=record.version,
        entry_point=record.entry_point,
    )


def _packages(package: str, manifest: Manifest) -> tuple[Path, ...]:
    """Where all code of the plugin lives: the entry point's top-level package and those of its classes."""
    targets = (package, manifest.plugin or package, manifest.options or package)
    tops = dict.fromkeys(target.partition(":")[0].partition(".")[0] for target in targets)
    return tuple(directory for top in tops for directory in package_directories(top))


def _nameless(distribution: Distribution) -> Record:
    place = str(distribution.locate_file(""))
    error = DiscoveryError(
        f"a distribution in {place} announces plugins, but its metadata has no readable name.",
        "Remove its remains from that directory, and install it again.",
        distribution="",
        version="",
    )
    return Record(name="?", distribution="?", version="?", error=error)
