"""pytest fixtures; import the ones wanted into a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from thunder_xform.testing.ranks import RankPool

__all__ = ["ranks"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two ranks, started at the first run and kept for the whole session."""
    pool = RankPool(world_size=2, timeout=120)
    yield pool
    pool.close()
