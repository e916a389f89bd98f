"""Versions of what a pipeline runs on, from metadata alone."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable

from thunder_xform.errors import HostVersionError, spell
from thunder_xform.registry._record import Record
from thunder_xform.registry.step import Step

__all__ = ["check_host", "host_versions", "installed_version", "require_host"]


@functools.cache
def installed_version(distribution: str) -> str | None:
    """The installed version of `distribution` (or of ``python``), or ``None``."""
    if distribution == "python":
        return platform.python_version()
    import importlib_metadata

    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def host_versions() -> dict[str, str | None]:
    """The versions that belong to a lock: Python's minor, Thunder, torch, and this package."""
    versions = {name: installed_version(name) for name in ("lightning-thunder", "thunder-xform", "torch")}
    return {**versions, "python": ".".join(platform.python_version_tuple()[:2])}


def check_host(announced: Record | Step, *, absent: bool) -> HostVersionError | None:
    """The error if the host is outside the ``[host]`` table.

    A host that is not installed at all counts only if `absent`: planning works where nothing can run.
    """
    unmet = []
    for distribution, specifier in (announced.manifest.host if announced.manifest else {}).items():
        version = installed_version(distribution)
        if version is None:
            if absent:
                unmet.append(f"{distribution} {specifier} (not installed)")
        elif not _contains(specifier, version):
            unmet.append(f"{distribution} {specifier} (installed: {version})")
    if not unmet:
        return None
    return HostVersionError(
        f"{announced.name!r} [{announced.origin}: host] needs {spell(unmet)}.",
        f"Install such a version, or a release of {announced.distribution} that supports the installed one.",
        plugin=announced.name,
        distribution=announced.distribution,
        unmet=tuple(unmet),
    )


def require_host(steps: Iterable[Step]) -> None:
    """Raise `HostVersionError` for the first step whose host is absent or outside its ``[host]`` table."""
    for step in steps:
        if error := check_host(step, absent=True):
            raise error


@functools.cache
def _contains(specifier: str, version: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return False
