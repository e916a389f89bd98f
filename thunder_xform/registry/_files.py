"""Find a plugin's files without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["module_file", "package_directories"]


def package_directories(package: str) -> tuple[Path, ...]:
    """The directories that the dotted `package` is imported from; empty where there is none.

    Only the top-level name is looked up by the import system, so that no parent package is executed; editable
    installs and namespace packages are found as well.
    """
    top, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return ()
    if spec is None or spec.submodule_search_locations is None:
        return ()
    found = (Path(location, *rest) for location in spec.submodule_search_locations)
    return tuple(path for path in found if path.is_dir())


def module_file(module: str) -> Path | None:
    """The source file of the dotted `module`, or ``None`` where there is no such file to read."""
    parent, _, name = module.rpartition(".")
    if not parent:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            return None
        origin = spec.origin if spec else None
        return Path(origin) if origin and origin.endswith(".py") else None
    for directory in package_directories(parent):
        for path in (directory / name / "__init__.py", directory / f"{name}.py"):
            if path.is_file():
                return path
    return None
