"""Where in the user's code a trace has come to."""

from __future__ import annotations

import dis
import linecache
from collections.abc import Iterable
from typing import Any

from thunder.core.interpreter import get_interpreterruntimectx

_OURS = ("thunder.", "thunder_xform.")
#: instructions that end a statement, or what it works out, other than by raising
_ENDS = ("STORE_", "RETURN_", "POP_", "JUMP_", "YIELD_")
# Functions of these are called by users, who did not write them.
_LIBRARIES = ("torch.", "random.", "lightning.fabric.wrappers.", "lightning_fabric.wrappers.")


def place() -> str:
    """File and line of the user's code that is being traced, with the line itself."""
    return place_of(get_interpreterruntimectx().frame_stack)


def in_users_code() -> bool:
    """Whether the innermost function that is being traced is none of Thunder's or ours."""
    return not _module(get_interpreterruntimectx().frame_stack[-1]).startswith(_OURS)


def in_models_code() -> bool:
    """Whether the innermost function that is being traced is none of PyTorch's either."""
    return not _module(get_interpreterruntimectx().frame_stack[-1]).startswith((*_OURS, "torch."))


def is_spelled(name: str) -> bool:
    """Whether the instruction that is being traced names an attribute, which Thunder also reads of its own accord."""
    inst = get_interpreterruntimectx().frame_stack[-1].inst
    return inst is not None and inst.argval == name


def is_raising() -> bool:
    """Whether the statement of the user's code that is being traced ends with raising an exception."""
    stack = get_interpreterruntimectx().frame_stack
    frame = next((frame for frame in reversed(stack) if not _module(frame).startswith(_OURS)), None)
    if frame is None or frame.inst is None:
        return False
    for inst in dis.get_instructions(frame.code):
        if inst.offset > frame.inst.offset:
            if inst.opname == "RAISE_VARARGS":
                return True
            if inst.opname.startswith(_ENDS):
                return False
    return False


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
