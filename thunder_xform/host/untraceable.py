"""Thunder's own exceptions, told as what in the model cannot be compiled, where, and what to do about it.

Thunder raises whatever its insides raise, where the model's own ``except`` clauses can catch it and go another way than
in eager PyTorch. Here each exception of a trace is judged at the instruction that it comes out of: the model's own goes
on as it is, what Thunder raised in its place becomes a :class:`TracingError` that no clause can silence.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import thunder
import torch
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    InterpreterError,
    do_raise,
    get_interpretercompilectx,
    get_interpreterruntimectx,
)
from thunder.core.jit_ext import JITSharpEdgeError, thunder_general_jit
from thunder.core.symbol import BoundSymbol

from thunder_xform.errors import TracingError, XformError
from thunder_xform.host.places import in_users_code, place, spelled_place
from thunder_xform.host.reasons import reason

_THUNDER, _OURS = (str(Path(file).parent) for file in (thunder.__file__, __file__))
_PLUGINS = [str(Path(_OURS).parent / "pipeline" / file) for file in ("hooks.py", "guard_key.py")]
#: what Python's protocols raise and catch again: no sign that something is wrong
_PROTOCOL = (AttributeError, LookupError, StopIteration, GeneratorExit, Warning)
_PASSES = "apply_transforms_and_build_cache_entry"


class Judge:
    """Judges the exceptions of the trace that is under way, from its making on.

    Attributes:
        refusal: the first error that says why it cannot be compiled.
    """

    def __init__(self) -> None:
        self.refusal: XformError | None = None
        self._passed: BaseException | None = None
        compiling = get_interpretercompilectx()
        interpret = compiling._opcode_interpreter

        def interpreted(inst: Any, /, **state: Any) -> Any:
            try:
                result = interpret(inst, **state)
            except Exception as error:
                result = do_raise(_refused(error))
            if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
                self._judge(inst)
            return result

        compiling._opcode_interpreter = interpreted

    def _judge(self, inst: Any) -> None:
        runtime = get_interpreterruntimectx()
        if runtime.curexc is self._passed:
            return
        if _is_thunders(runtime.curexc, inst.opname):
            runtime.curexc = _refused(runtime.curexc)
        if self.refusal is None and isinstance(runtime.curexc, XformError):
            self.refusal = runtime.curexc
        self._passed = runtime.curexc


def explain(error: Exception, model: torch.nn.Module, refusal: XformError | None) -> None:
    """Raise what ``error``, which came out of a call of a compiled model, means, if that is something else.

    Args:
        model: the user's module.
        refusal: what the latest trace cannot be compiled for, if the model's code caught that.

    Raises:
        TracingError: Thunder could not compile the model.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    compiled = [index for index, frame in enumerate(frames) if _compiles(frame.f_code)]
    if not compiled or isinstance(error, XformError):
        return
    if isinstance(error, InterpreterError) and error.__cause__ is not None:
        cause = error.__cause__
        if isinstance(cause, XformError) or not isinstance(cause, Exception):
            raise cause
    elif _is_judged(frames[compiled[-1] :]):
        return
    raise refusal or _untraceable(error, _place_of(frames, model)) from (refusal.__cause__ if refusal else error)


def _refused(error: BaseException) -> XformError:
    """What the trace ends with because of ``error``."""
    if isinstance(error, XformError):
        return error
    made = _untraceable(error, place())
    made.__cause__ = error
    return made


def _untraceable(error: BaseException, where: str) -> TracingError:
    problem, remedy = reason(error)
    return TracingError(f"{problem} ({where}).", remedy, place=where)


def _is_thunders(error: BaseException, opcode: str) -> bool:
    """Whether Thunder raised ``error`` in an instruction, rather than the model's code or Python in its name."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, XformError):
        return False
    if not frames:  # raised by the instruction itself
        models = opcode in ("RAISE_VARARGS", "RERAISE") and in_users_code()
        return not models and ("Proxy" in str(error) or _is_foreign(error))
    if isinstance(error, _PROTOCOL):
        return "Proxy" in str(error)
    files = [frame.f_code.co_filename for frame in frames]
    inside = [f.startswith((_THUNDER, _OURS)) and not f.endswith("interpreter.py") for f in files]
    return any(inside) or "Proxy" in str(error) or _is_foreign(error)


def _is_foreign(error: BaseException) -> bool:
    """Whether Python never raises it by itself."""
    return isinstance(error, (NotImplementedError, JITSharpEdgeError)) or str(error) in (
        "exceptions must derive from BaseException",
        "__index__ returned non-int (type NoneType)",
    )


def _compiles(code: CodeType) -> bool:
    return code is thunder_general_jit.__code__ or (code.co_name == _PASSES and code.co_filename == thunder.__file__)


def _is_judged(frames: list[FrameType]) -> bool:
    """Whether an error comes from interpreted code, and was judged there, or from a plugin."""
    return any(frame.f_code.co_name == "fn_" or frame.f_code.co_filename in _PLUGINS for frame in frames)


def _place_of(frames: list[FrameType], model: torch.nn.Module) -> str:
    """The line that made the operator which Thunder could not compile, or the model's forward."""
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, BoundSymbol) and value.source_filename and value.source_positions:
                return spelled_place(value.source_filename, value.source_positions.lineno)
    code = getattr(getattr(model.forward, "__func__", model.forward), "__code__", None)
    return spelled_place(code.co_filename, code.co_firstlineno) if code else type(model).__name__
