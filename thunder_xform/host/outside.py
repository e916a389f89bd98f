"""What a trace reads that neither its model nor its arguments hold, and that Thunder does not compare."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import get_interpretercompilectx

from thunder_xform.host.origins import is_global, real
from thunder_xform.host.reachable import ARRAYS, Reachable
from thunder_xform.host.stamp import MISSING, expected

_CONTAINERS = (list, dict, set, deque, *ARRAYS)
_LOADS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ENVIRONMENT: Any = os.environ


class Outside:
    """Containers that global names lead to, callables of global objects, and the environment, as a trace read them.

    Args:
        reachable: what the model holds, which is compared apart.

    Attributes:
        reads: a dictionary, a key in it, and ``stamp.expected`` of what it held when it was read.
        classes: a class and the name of an attribute that was looked up in it, perhaps in vain.
        functions: what was called and is not the language's, PyTorch's or Thunder's; its code and defaults may change.
        settings: functions and their arguments that read a setting, and what they gave.
    """

    def __init__(self, reachable: Reachable) -> None:
        self.reads: list[tuple[dict[Any, Any], Any, Any]] = []
        self.classes: dict[tuple[type, str], None] = {}
        self.functions: dict[FunctionType, None] = {}
        self.settings: list[tuple[Callable[..., Any], Any]] = []
        self._reachable = reachable
        self._seen: set[int] = set()

    def begin(self) -> None:
        """Watch the trace that is under way."""
        compiling = get_interpretercompilectx()
        interpret = compiling._opcode_interpreter

        def interpreted(inst: Any, /, **state: Any) -> Any:
            result = interpret(inst, **state)
            if inst.opname in _LOADS and state["stack"]:
                self._contents(state["stack"].getitem_wrapped(-1))
            return result

        compiling._opcode_interpreter = interpreted
        lookaside = compiling._fn_lookaside

        def called(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            self._call(fn)
            return lookaside(fn, *args, **kwargs)

        compiling._fn_lookaside = called
        traced = get_compile_data().fn
        self._call(type(traced).forward if isinstance(traced, torch.nn.Module) else traced)

    def attribute(self, owner: Any, name: str) -> None:
        """Compare from now on what an object holds under a name, if it is a container or can be called.

        Numbers, strings and None are Thunder's to compare.
        """
        holder = owner.value
        self.class_of(holder, name)
        if isinstance(holder, type) or holder is _ENVIRONMENT or not hasattr(holder, "__dict__"):
            return
        held = vars(holder).get(name, MISSING)
        mutable = isinstance(held, _CONTAINERS) or (callable(held) and not _is_torch(holder))
        if mutable and is_global(owner.provenance):
            self.reads.append((vars(holder), name, expected(held)))

    def class_of(self, holder: Any, name: str) -> None:
        """Compare from now on what a class has under a name, where an object's own dictionary has nothing."""
        kind = holder if isinstance(holder, type) else type(holder)
        if kind is not super and not isinstance(holder, ModuleType) and not _is_library(kind.__module__):
            self.classes[kind, name] = None

    def everything(self, owner: Any) -> None:
        """Compare all attributes of an object from now on, their order included."""
        holder = real(owner)
        if not hasattr(holder, "__dict__") or isinstance(holder, (type, ModuleType)):
            return
        if holder in self._reachable or is_global(owner.provenance):
            self.reads.append(({"": vars(holder)}, "", expected(vars(holder))))

    def reread(self, fn: Any, *args: Any) -> None:
        """Call ``fn``, which reads a setting, again on every call and compare what it gives."""
        if not args:
            self.settings.append((fn, fn()))

    def _call(self, fn: Any) -> None:
        if type(fn) is FunctionType and not _is_library(fn.__module__):
            self.functions[fn] = None

    def environment(self, fn: Any, environment: Any, name: Any) -> None:
        """Compare a variable of the environment from now on."""
        data, key = _ENVIRONMENT._data, _ENVIRONMENT.encodekey(name.value)
        self.reads.append((data, key, data.get(key, MISSING)))

    def _contents(self, container: Any) -> None:
        value = real(container)
        if not isinstance(value, _CONTAINERS) or id(value) in self._seen or not is_global(container.provenance):
            return
        if value not in self._reachable and id(value) not in self._reachable.members:
            self._seen.add(id(value))
            self.reads.append(({"": value}, "", expected(value)))


def _is_library(module: Any) -> bool:
    root = str(module).partition(".")[0]
    return root in ("torch", "thunder", "thunder_xform") or (root != "__main__" and root in sys.stdlib_module_names)


def _is_torch(holder: Any) -> bool:
    return isinstance(holder, ModuleType) and holder.__name__.partition(".")[0] in ("torch", "thunder")
