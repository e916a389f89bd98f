"""A test kit for authors of plugins.

Plain functions and fixtures; nothing registers itself with pytest. Import fixtures into a ``conftest.py``::

    from thunder_xform.testing.fixtures import ranks, sealed_registry
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thunder_xform.testing.memory import LiveBytes
    from thunder_xform.testing.numerics import assert_same_numerics
    from thunder_xform.testing.pipelines import pipeline_of
    from thunder_xform.testing.ranks import RankPool, RanksFailed, run_ranks
    from thunder_xform.testing.states import assert_state_laws
    from thunder_xform.testing.torchrun import torchrun_environment
    from thunder_xform.testing.traffic import Collective, Traffic

# Lazy, so that the processes of a RankPool decide themselves what they import.
_HOMES = {
    "Collective": "traffic",
    "LiveBytes": "memory",
    "RankPool": "ranks",
    "RanksFailed": "ranks",
    "Traffic": "traffic",
    "assert_same_numerics": "numerics",
    "assert_state_laws": "states",
    "pipeline_of": "pipelines",
    "run_ranks": "ranks",
    "torchrun_environment": "torchrun",
}

__all__ = [
    "Collective",
    "LiveBytes",
    "RankPool",
    "RanksFailed",
    "Traffic",
    "assert_same_numerics",
    "assert_state_laws",
    "pipeline_of",
    "run_ranks",
    "torchrun_environment",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"thunder_xform.testing.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'thunder_xform.testing' has no attribute {name!r}")
