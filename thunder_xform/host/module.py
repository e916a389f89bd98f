"""Compiled entries and transforms of jitted models, as Thunder keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import thunder
import torch
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS

from thunder_xform.errors import PipelineError


def drop_entries(statistics: Iterable[Any]) -> int:
    """Forget all compiled entries in Thunder's ``statistics``; the next call compiles. Returns how many there were."""
    dropped = 0
    for stats in statistics:
        dropped += len(stats.interpreter_cache)
        stats.interpreter_cache.clear()
    return dropped


def compile_data_of(module: Any) -> Any:
    """Thunder's compile data of a jitted module or function."""
    return thunder.compile_data(module)


def statistics_of(module: Any) -> Any:
    """Thunder's statistics, which hold the compiled entries, of a jitted module or function."""
    return thunder.compile_stats(module)


def refuse_caching(module: Any) -> None:
    """Raise for ways of caching compiled entries that a pipeline cannot guard."""
    option = compile_data_of(module).cache_option
    if option not in (CACHE_OPTIONS.CONSTANT_VALUES, CACHE_OPTIONS.NO_CACHING):
        name = option.name.lower().replace("_", " ")
        raise PipelineError(
            f"thunder.jit was given cache={name!r}, under which a transformed model cannot be compiled.",
            "Leave cache out, or pass cache='constant values' or cache='no caching'.",
        )


def add_transforms(module: Any, stages: Sequence[Any]) -> None:
    """Add transforms to a module that ``thunder.jit`` returned, called or not, and apply them."""
    data = thunder.compile_data(module)
    if not isinstance(module, ThunderModule) or data is None:
        raise PipelineError(
            f"{type(module).__name__} is not a model compiled by thunder.jit.",
            "Pass what thunder.jit(model) returned, or the plain model to thunder.jit with transforms=pipeline.",
        )
    if not isinstance(data.transforms, list):
        raise PipelineError(
            "The model was compiled with transforms= given as a tuple, which cannot grow.",
            "Pass a list to thunder.jit.",
        )
    if not module._lc_transforms:
        # Moving or converting a jitted module gives the user's module other buffers than Thunder noted down.
        module._overrides_parameters = dict(module._model.named_parameters())
        module._overrides_buffers = dict(module._model.named_buffers())
    for stage in stages:
        stage.transform_module(module)
        module._lc_transforms.append(stage)
    data.transforms.extend(stages)
    drop_entries([statistics_of(module)])


def apply(model: torch.nn.Module, stages: Sequence[Any]) -> ThunderModule:
    """``thunder.jit`` of a plain model with ``stages``."""
    return thunder.jit(model, transforms=list(stages))


def transforms_of(jitted: Any) -> Sequence[Any]:
    """The transforms of a jitted module or function; empty for anything else."""
    data = thunder.compile_data(jitted)
    return () if data is None else data.transforms
