"""Does a given state fit? Checked before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_xform.errors import CheckpointError, closest
from thunder_xform.host.ledger import Ledger

#: How many problems of one kind an error spells out.
_SHOWN = 5


def check_keys(
    expected: Collection[str], given: Collection[str], strict: bool, *, partial: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Missing and unexpected keys, in order.

    Args:
        expected: keys of the model.
        given: keys of the state.
        strict: whether any is an error.
        partial: missing ones are none.

    Raises:
        CheckpointError: with ``missing`` and ``unexpected``, and the closest match for each unexpected key.
    """
    missing = () if partial else tuple(key for key in expected if key not in given)
    unexpected = tuple(key for key in given if key not in expected)
    if strict and (missing or unexpected):
        problems = []
        if missing:
            problems.append(f"lacks {_listed([repr(key) for key in missing])}")
        if unexpected:
            hints = [f"{key!r}{_hint(key, missing or expected)}" for key in unexpected]
            problems.append(f"has unexpected {_listed(hints)}")
        raise CheckpointError(
            f"The state {' and '.join(problems)}.",
            "Load it into the model and pipeline it was saved from, or pass strict=False to load what fits.",
            missing=missing,
            unexpected=unexpected,
        )
    return missing, unexpected


def _hint(key: str, known: Collection[str]) -> str:
    return f" ({hint.strip()})" if (hint := closest(key, known)) else ""


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def check_values(given: Mapping[str, Any], *, distributed: bool = False) -> None:
    """Refuse values that are no tensors, or that cannot be copied into an ordinary one.

    Args:
        given: values by key.
        distributed: whether DTensors are welcome.
    """
    _refuse(f"{key!r} {fault}" for key, value in given.items() if (fault := _fault(value, distributed)))


def _fault(value: Any, distributed: bool) -> str:
    """What is wrong with a value, as the rest of a sentence; empty if nothing is."""
    if not isinstance(value, torch.Tensor):
        return f"is of type {type(value).__name__} and no tensor"
    if isinstance(value, DTensor):
        return "" if distributed else f"is a DTensor in {value.placements}; its full_tensor() is wanted"
    if value.is_meta or is_fake(value):
        return "is on the meta device and has no data"
    if is_lazy(value):
        return "is not initialized yet"
    if value.is_nested or value.layout != torch.strided:
        return f"is {'nested' if value.is_nested else value.layout} and no dense tensor"
    if value.is_quantized:
        return f"is quantized ({value.dtype}); its dequantize() is wanted"
    subclass: object = value
    return f"is a {type(value).__name__} and no plain tensor" if is_traceable_wrapper_subclass(subclass) else ""


def check_shapes(given: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors of other shapes."""
    _refuse(
        f"{key!r} has shape {tuple(value.shape)} instead of {shapes[key]}"
        for key, value in given.items()
        if tuple(value.shape) != shapes[key]
    )


def check_numbers(given: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Refuse conversions between complex, floating and integral numbers, and those that torch does not have."""
    problems, copied = [], set()
    for key, value in given.items():
        wanted = dtypes[key]
        if _numbers(value.dtype) != _numbers(wanted):
            problems.append(f"{key!r} is {value.dtype}, but the model holds {wanted}")
        elif value.dtype != wanted and (value.dtype, wanted) not in copied:
            try:
                torch.empty(1, dtype=wanted).copy_(torch.empty(1, dtype=value.dtype))
            except (RuntimeError, NotImplementedError):
                problems.append(f"{key!r} is {value.dtype}, which torch cannot convert to {wanted}")
            copied.add((value.dtype, wanted))
    _refuse(problems)


def check_writable(live: Mapping[str, torch.Tensor]) -> None:
    """Refuse to write to tensors of the model that cannot be written to."""
    problems = []
    for key, tensor in live.items():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            problems.append(f"{key!r} was made in inference mode")
        elif any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            problems.append(f"{key!r} is an expanded view")
    if problems:
        raise CheckpointError(
            f"The model cannot be written to: {_listed(problems)}.",
            "Give the module clones of them before thunder.jit.",
            mismatched=tuple(problems),
        )


def _numbers(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "integral"


def _refuse(problems: Iterable[str]) -> None:
    if problems := tuple(problems):
        raise CheckpointError(
            f"The state does not fit: {_listed(problems)}.",
            "Load it into a model of the same architecture and options.",
            mismatched=problems,
        )


def fold_aliases(ledger: Ledger, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One entry for each tied tensor.

    Raises:
        CheckpointError: two names of one tensor come with different values.
    """
    folded: dict[str, torch.Tensor] = {}
    for key, value in given.items():
        name = ledger.canonical(key)
        first = folded.setdefault(name, value)
        if first is not value and not _same(first, value):
            raise CheckpointError(
                f"{key!r} and {name!r} are one tensor in the model, but differ in the state.",
                "Untie them in the model, or load the state of a model in which they are tied.",
                keys=(name, key),
            )
    return folded


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    def place(tensor: torch.Tensor) -> tuple[object, ...]:
        return tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.device

    return place(a) == place(b) or torch.equal(a.cpu(), b.cpu().to(a.dtype))
