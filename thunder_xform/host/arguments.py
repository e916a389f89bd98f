"""Arguments of a call that Thunder's prologue does not check: a compiled entry is for their types and values.

Thunder checks tensors, numbers and strings that were read. Of everything else it takes the first call's value for
granted.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

#: Types whose values say everything; ``==`` between two of one type compares them.
_VALUES = (
    bool,
    int,
    str,
    bytes,
    range,
    type(None),
    type(...),
    type(NotImplemented),
    type,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
#: An empty cell of a closure.
_EMPTY = types.CellType()


class _Same:
    """Equal to the very same object only, which it keeps alive: no other object takes its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def signature(args: Sequence[Any] = (), kwargs: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """What a compiled entry depends on in arguments, except what tensors are: types, values, structure, identities.

    Two signatures are equal where the arguments mean the same to a trace. Objects of unknown types are taken apart into
    their attributes, so that one that was changed differs from what it was.
    """
    seen: dict[int, int] = {}
    return (
        [torch.Tensor if type(value) is torch.Tensor else _describe(value, seen) for value in args],
        [(name, _describe(value, seen)) for name, value in kwargs.items()],
    )


def _describe(value: Any, seen: dict[int, int]) -> Any:
    cls = type(value)
    if isinstance(value, (float, complex)):
        # Unlike `==`, text tells -0.0 from 0.0 and finds nan equal to itself.
        return cls, repr(value)
    if isinstance(value, _VALUES):
        return cls, value
    if cls is _Same:
        return value
    if isinstance(value, torch.Tensor):
        return cls, _describe(value.__dict__, seen) if value.__dict__ else None
    if id(value) in seen:
        return cls, seen[id(value)]
    seen[id(value)] = len(seen)
    parts = _parts(value)
    return cls, _Same(value) if parts is None else [_describe(part, seen) for part in parts]


def _parts(value: Any) -> Iterable[Any] | None:
    """What an argument consists of; None of one that hides its state, which is known by its identity."""
    if isinstance(value, (tuple, list, collections.deque)):
        return value
    if isinstance(value, Mapping):
        # A trace may iterate: the order counts.
        return itertools.chain.from_iterable(value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=lambda item: (type(item).__qualname__, repr(item)))
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        return _Same(value), value.__defaults__, value.__kwdefaults__, cells
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, torch.nn.Module):
        return None
    try:
        content = memoryview(value)
    except TypeError:
        return _attributes(value)
    return content.format, content.shape, content.tobytes()


def _attributes(value: Any) -> Iterable[Any] | None:
    """Names and values of the attributes of an object written in Python."""
    cls = type(value)
    if not cls.__flags__ & 1 << 9:  # made by a class statement, that is, on the heap
        return None
    slots = [name for base in cls.__mro__ for name in _slots(base)]
    state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if not slots and not hasattr(value, "__dict__"):
        return None
    return itertools.chain.from_iterable((state | getattr(value, "__dict__", {})).items())


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
