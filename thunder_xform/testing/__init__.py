"""A test kit for authors of plugins.

Plain functions and fixtures; nothing registers itself with pytest. Import fixtures into a ``conftest.py``::

    from thunder_xform.testing.fixtures import ranks
"""

from __future__ import annotations

from thunder_xform.testing.ranks import RankPool, RanksFailed, run_ranks

__all__ = ["RankPool", "RanksFailed", "run_ranks"]
