import pytest

from thunder_xform.testing import RankPool
from thunder_xform.testing.fixtures import ranks

__all__ = ["four_ranks", "ranks"]


@pytest.fixture(scope="session")
def four_ranks():
    pool = RankPool(world_size=4, timeout=180)
    yield pool
    pool.close()
