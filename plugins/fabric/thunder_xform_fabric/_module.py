"""From the module that Fabric was given to the transformed model that it trains."""

from __future__ import annotations

import weakref
from typing import Any

import thunder
import torch
from torch.nn.modules.module import register_module_module_registration_hook

import thunder_xform as tx

#: Handles of hooks that did their work or lost their model. PyTorch iterates over its hooks while it calls them, so
#: none may be removed there.
_spent: set[Any] = set()


def transform(module: torch.nn.Module, pipeline: tx.Pipeline, jit: bool, executors: Any) -> torch.nn.Module:
    """Transform a plain module, or one that ``thunder.jit`` compiled, called or not.

    Raises:
        PipelineError: the module is transformed by another pipeline, or compiled already while ``executors`` are given.
    """
    if thunder.compile_data(module) is not None:
        if executors is not None:
            raise tx.errors.PipelineError(
                "The strategy has executors, but the model was compiled by thunder.jit already.",
                "Pass executors= to that thunder.jit, or the plain model to fabric.setup.",
            )
        transformed: torch.nn.Module = pipeline.apply(module)
        return transformed
    if jit:
        options = {} if executors is None else {"executors": executors}
        transformed = thunder.jit(module, transforms=pipeline, **options)
    else:
        transformed = pipeline.bind(module).model
    _stand_in(module, transformed)
    return transformed


def is_transformed(module: Any) -> bool:
    """Whether a pipeline transforms the module."""
    try:
        tx.handle(module)
    except tx.errors.PipelineError:
        return False
    return True


def _stand_in(plain: torch.nn.Module, transformed: torch.nn.Module) -> None:
    """Let Fabric's wrapper hold the transformed model also as its "original module".

    Fabric puts the module that it was given into the wrapper next to what the strategy made of it. Both would show in
    ``parameters()``, and ``state_dict()`` would be the plain one's. PyTorch asks this hook when the wrapper registers
    it.
    """
    while _spent:
        _spent.pop().remove()
    given, made = weakref.ref(plain), weakref.ref(transformed)

    def replace(wrapper: torch.nn.Module, name: str, value: torch.nn.Module | None) -> Any:
        found = made()
        wanted = name == "_original_module" and value is not None and value is given()
        if wanted or found is None:
            _spent.add(hook)
        return found if wanted else None

    hook = register_module_module_registration_hook(replace)
