"""Where in the user's code a trace has come to."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from typing import Any

from thunder.core.interpreter import get_interpreterruntimectx

_OURS = ("thunder.", "thunder_xform.")
# Functions of these are called by users, who did not write them.
_LIBRARIES = ("torch.", "random.", "lightning.fabric.wrappers.", "lightning_fabric.wrappers.")


def place() -> str:
    """File and line of the user's code that is being traced, with the line itself."""
    return place_of(get_interpreterruntimectx().frame_stack)


def in_users_code() -> bool:
    """Whether the innermost function that is being traced is none of Thunder's or ours."""
    return not _module(get_interpreterruntimectx().frame_stack[-1]).startswith(_OURS)


def place_of(frames: Iterable[Any]) -> str:
    """The same for given frames of Thunder's interpreter, outermost first."""
    frames = [frame for frame in frames if not _module(frame).startswith(_OURS)]
    for frame in [f for f in reversed(frames) if not _module(f).startswith(_LIBRARIES)] or frames[-1:]:
        line = frame.positions.lineno if frame.positions else frame.code.co_firstlineno
        return spelled_place(frame.code.co_filename, line)
    return "unknown place"


def spelled_place(file: str, line: int) -> str:
    """``file:line``, with the line itself."""
    code = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f": {code}" if code else "")


def _module(frame: Any) -> str:
    return str(getattr(frame.globals, "value", frame.globals).get("__name__", "")) + "."
