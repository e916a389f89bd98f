"""The ThunderModule as a session holds it: what users and trainers touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder
from thunder.core.module import ThunderModule

_SESSION = "_thunder_xform_session"


def attach(module: ThunderModule, session: Any, no_sync: Callable[[], Any]) -> None:
    """Tie a session to a ThunderModule. ``module.no_sync`` becomes the session's: trainers look for it there."""
    module.__dict__[_SESSION] = session
    module.__dict__["no_sync"] = no_sync


def session_of(module: Any) -> Any | None:
    """The session that transforms ``module``, or None."""
    return getattr(module, "__dict__", {}).get(_SESSION)


def drop_compiled_entries(module: ThunderModule) -> int:
    """Forget all compiled entries; the next call compiles. Returns how many there were."""
    cache = thunder.compile_stats(module).interpreter_cache
    dropped = len(cache)
    cache.clear()
    return dropped


def compiled_entries(module: ThunderModule) -> int:
    """How many compiled entries the module holds."""
    return len(thunder.compile_stats(module).interpreter_cache)
