"""Thunder's own transforms in front of a pipeline: what they may leave, and who is named for what they may not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from thunder.core.module import ThunderModule

from thunder_xform.errors import PipelineError, spell


def refuse_converted(module: ThunderModule) -> None:
    """Raise for a tensor that a transform in front converted: the ledger starts from what the user's module has."""
    for problem in _converted(module):
        raise _blame(module._lc_transforms, problem)


def refuse_inconsistent(transforms: Iterable[Any], problems: Iterable[str]) -> None:
    """Raise for the first of the ``problems`` of the trace that ``transforms`` in front of the pipeline left."""
    transforms = list(transforms)
    for problem in problems if transforms else ():
        raise _blame(transforms, problem)


def _blame(transforms: Iterable[Any], problem: str) -> PipelineError:
    names = list(dict.fromkeys(type(transform).__name__ for transform in transforms))
    who = f"The transform {names[0]}" if len(names) == 1 else f"One of the transforms {spell(names)}"
    return PipelineError(
        f"{who} in front of the pipeline leaves the model in a state that no plugin can take over: {problem}.",
        "Put it behind the pipeline: transforms=[*pipeline, ...].",
        transforms=tuple(names),
    )


def _converted(module: ThunderModule) -> Iterator[str]:
    model = module._model
    for kind, named, held in (
        ("parameter", dict(model.named_parameters(remove_duplicate=False)), module._overrides_parameters),
        ("buffer", dict(model.named_buffers(remove_duplicate=False)), module._overrides_buffers),
    ):
        yield from (f"it adds the {kind} {name!r}" for name in held if name not in named)
        for name, tensor in named.items():
            # Of a tied tensor Thunder holds one name alone.
            if name in held and (now := _look(held[name])) != (was := _look(tensor)):
                a, b = next((a, b) for a, b in zip(was, now, strict=True) if a != b)
                yield f"it holds the {kind} {name!r} as {b} instead of {a}"


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device, tensor.layout
