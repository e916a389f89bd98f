"""Regular transforms for Lightning Thunder: DDP, FSDP, LoRA, quantization by name, in the right order.

>>> import thunder_xform as tx           # before thunder: also makes it importable on torch >= 2.13
>>> import thunder
>>> pipeline = tx.registry.resolve(["fsdp", "lora"], options={"lora": {"r": 8}})
>>> model = thunder.jit(model, transforms=pipeline)

``tx.ops`` is Thunder's operator namespace (:mod:`thunder.torch`), for code that rewrites traces.

Importing this package loads neither torch nor Thunder; both come with the first attribute that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thunder_xform.host import compat as _compat

if TYPE_CHECKING:
    import thunder.torch as ops

    from thunder_xform import checkpoint, errors, parallel, patterns, registry
    from thunder_xform.hookspecs import hookimpl
    from thunder_xform.host.computation import Computation
    from thunder_xform.host.editor import Edit
    from thunder_xform.host.operation import Operation
    from thunder_xform.host.operators import Operator, operator, tensor_like
    from thunder_xform.host.parameters import Parameters
    from thunder_xform.host.prologue import Prologue
    from thunder_xform.host.schedule import Schedule
    from thunder_xform.pipeline import CompileEvent, Context, Handle, Pipeline, Timing, TraceDump
    from thunder_xform.pipeline.handle import handle
    from thunder_xform.plugin import Plugin

_HOMES = {
    "CompileEvent": "thunder_xform.pipeline",
    "Computation": "thunder_xform.host.computation",
    "Context": "thunder_xform.pipeline",
    "Edit": "thunder_xform.host.editor",
    "Handle": "thunder_xform.pipeline",
    "Operation": "thunder_xform.host.operation",
    "Operator": "thunder_xform.host.operators",
    "Parameters": "thunder_xform.host.parameters",
    "Pipeline": "thunder_xform.pipeline",
    "Plugin": "thunder_xform.plugin",
    "Prologue": "thunder_xform.host.prologue",
    "Schedule": "thunder_xform.host.schedule",
    "Timing": "thunder_xform.pipeline",
    "TraceDump": "thunder_xform.pipeline",
    "handle": "thunder_xform.pipeline",
    "hookimpl": "thunder_xform.hookspecs",
    "operator": "thunder_xform.host.operators",
    "tensor_like": "thunder_xform.host.operators",
}
_MODULES = ("checkpoint", "errors", "parallel", "patterns", "registry")

__all__ = [
    "CompileEvent",
    "Computation",
    "Context",
    "Edit",
    "Handle",
    "Operation",
    "Operator",
    "Parameters",
    "Pipeline",
    "Plugin",
    "Prologue",
    "Schedule",
    "Timing",
    "TraceDump",
    "checkpoint",
    "errors",
    "handle",
    "hookimpl",
    "operator",
    "ops",
    "parallel",
    "patterns",
    "registry",
    "tensor_like",
]

_compat.install()


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("thunder.torch")
    if name in _MODULES:
        return importlib.import_module(f"thunder_xform.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'thunder_xform' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
