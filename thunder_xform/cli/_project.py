"""Does a project that is not installed announce its manifest?"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thunder_xform.registry._discovery import GROUP, is_misspelt

__all__ = ["announcement_errors"]


def announcement_errors(manifest: Path, name: str) -> Iterator[str]:
    """What keeps the plugin `name` of that manifest from being found, by the nearest ``pyproject.toml`` above it."""
    folders = manifest.resolve().parents[:3]
    project = next((path for folder in folders if (path := folder / "pyproject.toml").is_file()), None)
    groups = _entry_points(project) if project else None
    if groups is None:
        return
    misspelt = [group for group in groups if is_misspelt(group)]
    for group in misspelt:
        yield f"{project}: the entry-point group {group!r} is read by nothing. Call it {GROUP!r}."
    here = f":{manifest.name}"
    announced = groups.get(GROUP) or {}
    mine = [entry for entry, target in announced.items() if str(target).endswith(here)]
    if name not in announced and not misspelt:
        wrong = (
            f"announces {' and '.join(map(repr, mine))}, but not {name!r}" if mine else f"does not announce {name!r}"
        )
        yield f"{project} {wrong}. Write [project.entry-points.{GROUP!r}] with {name} = 'package{here}'."


def _entry_points(project: Path) -> dict[str, Any] | None:
    """The entry-point groups that are written there; ``None`` if a build tool makes them, or nothing can be read."""
    try:
        table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if not table or "entry-points" in table.get("dynamic", ()):
            return None
        return dict(table.get("entry-points", {}))
    except Exception:  # Deep nesting, long numbers, other encodings: build tools will tell.
        return None
