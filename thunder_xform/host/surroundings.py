"""What each call reads or sets anew and a trace once: random numbers, clocks, files, global settings."""

from __future__ import annotations

import datetime
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch
from thunder.core.interpreter import get_interpreterruntimectx

_CLOCKS = "time monotonic perf_counter process_time thread_time"
_CALENDAR = "localtime gmtime ctime asctime strftime"
_GENERATORS = "manual_seed seed get_rng_state set_rng_state"
_SETTERS = (
    "set_default_dtype set_default_device use_deterministic_algorithms set_deterministic_debug_mode set_num_threads "
    "set_float32_matmul_precision"
)
_SETTINGS = (
    "are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled get_deterministic_debug_mode "
    "get_num_threads get_num_interop_threads get_float32_matmul_precision get_default_device initial_seed "
    "is_anomaly_enabled is_anomaly_check_nan_enabled is_warn_always_enabled is_autocast_cache_enabled"
)


def unrepeatable() -> dict[Callable[..., Any], str]:
    """Functions that give or do something else on each call, and what the model does that calls them.

    Methods are those of the type, which Thunder's interpreter calls in place of bound ones.
    """
    found: dict[Callable[..., Any], str] = {
        random.Random.random: "reads Python's random numbers",
        random.Random.getrandbits: "reads Python's random numbers",
        os.urandom: "reads the system's random numbers",
        open: "opens a file",
        datetime.datetime.now: "reads datetime.now()",
        datetime.datetime.utcnow: "reads datetime.utcnow()",
        datetime.datetime.today: "reads datetime.today()",
        datetime.date.today: "reads date.today()",
    }
    for name in _CLOCKS.split():
        found |= {getattr(time, each): f"reads time.{each}()" for each in (name, f"{name}_ns")}
    found |= {getattr(time, name): f"calls time.{name}()" for name in _CALENDAR.split()}
    found |= {getattr(torch, name): f"calls torch.{name}()" for name in (_GENERATORS + " " + _SETTERS).split()}
    for kind in (numpy.random.RandomState, numpy.random.Generator):
        methods = [getattr(kind, name) for name in dir(kind) if not name.startswith("_")]
        found |= dict.fromkeys(filter(callable, methods), "reads NumPy's random numbers")
    return found


def rereadable() -> tuple[Callable[..., Any], ...]:
    """Functions that read a setting: cheap enough to call on every call, and the same between two changes of it."""
    return (
        *(getattr(torch, name) for name in _SETTINGS.split()),
        sys.getrecursionlimit,
        os.getpid,
        os.getcwd,
        threading.get_ident,
    )


def is_logging() -> bool:
    """Whether the code that is being traced writes a log record: its caches and clocks have no part in a result."""
    frames = get_interpreterruntimectx().frame_stack
    return any(getattr(f.globals, "value", f.globals).get("__name__") == "logging" for f in frames)


def write_log(logger: logging.Logger, *args: Any, **kwargs: Any) -> None:
    """``logging.Logger._log``, not traced: a record is written while a call is traced, and not by later ones."""
    logger._log(*args, **kwargs)
