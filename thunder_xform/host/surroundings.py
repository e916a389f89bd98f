"""What each call reads anew and a trace once: random numbers of Python and NumPy, clocks."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import numpy
from thunder.core.interpreter import get_interpreterruntimectx

_CLOCKS = "time monotonic perf_counter process_time thread_time"


def unrepeatable() -> dict[Callable[..., Any], str]:
    """Functions that give something else on each call, under the names that their users know.

    Methods are those of the type, which Thunder's interpreter calls in place of bound ones.
    """
    found: dict[Callable[..., Any], str] = {
        random.Random.random: "Python's random numbers",
        random.Random.getrandbits: "Python's random numbers",
    }
    for name in _CLOCKS.split():
        found |= {getattr(time, each): f"time.{each}()" for each in (name, f"{name}_ns")}
    for kind in (numpy.random.RandomState, numpy.random.Generator):
        methods = [getattr(kind, name) for name in dir(kind) if not name.startswith("_")]
        found |= dict.fromkeys(filter(callable, methods), "NumPy's random numbers")
    return found


def is_logging() -> bool:
    """Whether the code that is being traced writes a log record: its caches and clocks have no part in a result."""
    frames = get_interpreterruntimectx().frame_stack
    return any(getattr(f.globals, "value", f.globals).get("__name__") == "logging" for f in frames)


def write_log(logger: logging.Logger, *args: Any, **kwargs: Any) -> None:
    """``logging.Logger._log``, not traced: a record is written while a call is traced, and not by later ones."""
    logger._log(*args, **kwargs)
