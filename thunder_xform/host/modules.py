"""Which module wrote an operator: recorded while Thunder traces, since bound symbols do not tell.

Thunder looks up functions that it meets in the compile data's lookasides. One for ``Module.__call__``, in the compile
data of one model, sees modules being entered and left; what was traced between is theirs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from thunder.core.interpreter import _interpret_call, unwrap
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.trace import TraceCtx

_CALL = torch.nn.Module.__call__


def _body(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``Module.__call__``, to be interpreted in its place."""
    if module._compiled_call_impl is not None:
        return module._compiled_call_impl(*args, **kwargs)
    return module._call_impl(*args, **kwargs)


class ModuleRecord:
    """The module, by dotted path, and the number of its call for each operator traced last."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._paths = {id(part): path for path, part in model.named_modules()}
        self._calls: Counter[str] = Counter()
        self._found: dict[str, tuple[str, int]] = {}
        self._renamed: Mapping[Any, Any] = {}

    def install(self, compile_data: Any) -> None:
        """Record what is traced for ``compile_data`` from now on."""
        compile_data.executor_lookasides[_CALL] = self._call

    def take(self, trace: TraceCtx) -> dict[str, tuple[str, int]]:
        """What was recorded, by names of outputs."""
        for variable, proxy in self._renamed.items():
            if variable.proxy.name in self._found:
                self._found[proxy.name] = self._found[variable.proxy.name]
        modules: dict[str, tuple[str, int]] = {}
        latest = ("", 0)
        for bsym in trace.bound_symbols:
            names = [o.name for o in bsym.flat_proxy_outs]
            # What Thunder inserted after tracing, for an update in place, belongs to what stands before it.
            latest = next((self._found[name] for name in names if name in self._found), latest)
            modules |= dict.fromkeys(names, latest)
        self._found, self._renamed = {}, {}
        return modules

    def _call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        # The interpreter wraps values to follow where they come from, and unwraps them for lookasides.
        caller = sys._getframe(1).f_locals
        wrapped, named = caller["args"], caller["kwargs"]
        path = self._paths.get(id(unwrap(wrapped[0])))
        if path is None:
            return _interpret_call(_body, *wrapped, **named)
        if path == "":  # another trace begins
            self._calls.clear()
            self._found.clear()
        number = self._calls[path]
        self._calls[path] += 1
        tracing = get_jit_ctx()
        self._renamed = tracing._proxy_swapmap
        scope = tracing.computation_trace.peek_scope()
        start = len(scope)
        result = _interpret_call(_body, *wrapped, **named)
        for bsym in scope[start:]:
            for output in bsym.flat_proxy_outs:
                self._found.setdefault(output.name, (path, number))
        return result
