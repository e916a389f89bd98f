"""pytest fixtures; import the ones wanted into a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from thunder_xform import registry
from thunder_xform.manifest import Manifest
from thunder_xform.registry import Record, Registry
from thunder_xform.testing.ranks import RankPool

__all__ = ["SealedRegistry", "ranks", "sealed_registry"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two ranks, started at the first run and kept for the whole session."""
    pool = RankPool(world_size=2, timeout=120)
    yield pool
    pool.close()


class SealedRegistry:
    """What :mod:`thunder_xform.registry` sees while the fixture is in use: nothing but what was added."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, manifest: str | Path, *, distribution: str = "", version: str = "0") -> Manifest:
        """Announce a plugin.

        Args:
            manifest: TOML text, or the path of a manifest file.
            distribution: what it claims to come from; by default ``thunder-xform-NAME``.
            version: of that distribution.

        Raises:
            ManifestError: the manifest is not valid.
        """
        read = Manifest.read(manifest) if isinstance(manifest, Path) else Manifest.parse(manifest)
        name = distribution or f"thunder-xform-{read.name.replace('_', '-')}"
        self.records.append(Record(name=read.name, distribution=name, version=version, manifest=read))
        return read


@pytest.fixture
def sealed_registry(monkeypatch: pytest.MonkeyPatch) -> SealedRegistry:
    """Hides all installed plugins, and the environment's allow and deny lists, from the registry's functions."""
    sealed = SealedRegistry()
    monkeypatch.setattr(registry, "installed", lambda: Registry(sealed.records))
    return sealed
