import pytest

from thunder_xform.testing import RankPool
from thunder_xform.testing.fixtures import ranks

__all__ = ["ranks", "three_ranks"]


@pytest.fixture(scope="session")
def three_ranks():
    with RankPool(3, preload=("thunder_xform", "torch")) as pool:
        yield pool
