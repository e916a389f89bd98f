"""What a compiled entry takes for granted of the attributes that its trace read, compared on every call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any

import torch

from thunder_xform.host.reachable import ARRAYS

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
#: equal where they are one function of one object, for PyTorch's classes make them anew
_METHODS = (MethodType, BuiltinMethodType)
_PLAIN = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.nn.Module)


class _SameContent:
    """Equals arrays of one type, shape and content, of NumPy or the standard library."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._content = self._of(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ARRAYS) and self._of(other) == self._content

    @staticmethod
    def _of(value: Any) -> tuple[Any, ...]:
        content = bytes(value) if isinstance(value, bytearray) else value.tobytes()
        return type(value), getattr(value, "dtype", None), getattr(value, "shape", None), content


class _Missing:
    def __repr__(self) -> str:
        return "missing"


class _AnyTensor:
    """Equals every tensor: what is asked of tensors, the prologue checks."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Tensor)


class _Same:
    """Equals one object only, whatever that object calls equal: its own attributes are compared apart."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return other is self._value


MISSING = _Missing()
_ANY_TENSOR = _AnyTensor()


class Stamp:
    """The attributes that a trace read, as they were.

    Args:
        reads: an object, the name of an attribute, and :func:`expected` of it when it was read.
        outside: what else was read; see :class:`~thunder_xform.host.outside.Outside`.
        modules: all modules; a hook that is added to one changes what the model computes.
    """

    def __init__(self, reads: Iterable[tuple[Any, str, Any]], outside: Any, modules: Iterable[torch.nn.Module]) -> None:
        own: list[tuple[dict[Any, Any], Any, Any]] = [*outside.reads]
        inherited = dict(outside.classes)
        for owner, name, value in reads:
            own.append((vars(owner), name, value))
            if name not in vars(owner) or hasattr(type(owner), name):
                inherited[type(owner), name] = None
        self._dicts, self._names = [d for d, _, _ in own], [n for _, n, _ in own]
        self._values = [value for _, _, value in own]
        self._types = [type(held.get(name, MISSING)) for held, name, _ in own]
        self._defaults = [MISSING] * len(own)
        # What `==` takes for one, zeros of two signs.
        zeros = [(d, n) for d, n, _ in own if isinstance(d.get(n), float) and d[n] == 0]
        self._zero_dicts, self._zero_names = [d for d, _ in zeros], [n for _, n in zeros]
        self._zeros = [repr(d[n]) for d, n in zeros]
        classes = [(c, n, value) for c, n in inherited if (value := _of_class(c, n)) is not None]
        self._classes, self._class_names = [c for c, _, _ in classes], [n for _, n, _ in classes]
        self._class_values, self._class_defaults = [v for _, _, v in classes], [MISSING] * len(classes)
        self._functions = [*outside.functions]
        self._definitions = [(code, expected(a), expected(k)) for code, a, k in map(_definition, self._functions)]
        self._settings, self._set = [fn for fn, _ in outside.settings], [value for _, value in outside.settings]
        self._hooks = [vars(m)[name] for m in modules for name in _HOOKS]
        self._hook_counts = list(map(len, self._hooks))

    def holds(self) -> bool:
        """Whether all attributes are what they were."""
        try:
            held = [*map(dict.get, self._dicts, self._names, self._defaults)]
            # One pass in C over each: the expected value asks, because tensors do not answer.
            return (
                self._values == held
                and self._types == [*map(type, held)]
                and self._zeros == [*map(repr, map(dict.get, self._zero_dicts, self._zero_names))]
                and self._hook_counts == [*map(len, self._hooks)]
                and self._class_values == [*map(getattr, self._classes, self._class_names, self._class_defaults)]
                and self._definitions == [*map(_definition, self._functions)]
                and self._set == [fn() for fn in self._settings]
            )
        except Exception:
            return False


_definition = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def _of_class(kind: type, name: str) -> Any:
    """What a class is expected to have under a name; None if it makes something else each time that it is asked."""
    value = expected(getattr(kind, name, MISSING))
    return value if value == getattr(kind, name, MISSING) else None


class _Ordered:
    """Equals dictionaries of one type with equal items in one order, in which a trace may have iterated."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._type = type(value)
        self._items = [(key, expected(item)) for key, item in value.items()]

    def __eq__(self, other: Any) -> bool:
        return type(other) is self._type and self._items == [*other.items()]


def expected(value: Any) -> Any:
    """What to compare with: the value, or a copy of a container or an array, which may change in place."""
    if isinstance(value, torch.Tensor):
        return _ANY_TENSOR
    if isinstance(value, (dict, MappingProxyType)):
        return _Ordered(value)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        if isinstance(value, (set, frozenset)):
            return set(value)
        items = [expected(item) for item in value]
        return items if isinstance(value, list) else tuple(items) if isinstance(value, tuple) else deque(items)
    if isinstance(value, ARRAYS):
        return _SameContent(value)
    if isinstance(value, (*_PLAIN, *_METHODS)) or _compares_identity(value):
        return value
    return _Same(value)


def _compares_identity(value: Any) -> bool:
    return not any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1])


def spelled(owner_path: str, name: str, value: Any) -> tuple[str, str]:
    """An attribute and its value, in words."""
    subject = f"module {owner_path}.{name}" if owner_path else f"module {name}"
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
        return subject, f"{type(value).__name__} of {len(value)}"
    if isinstance(value, _PLAIN) and not isinstance(value, torch.nn.Module):
        return subject, repr(value)
    return subject, getattr(value, "__qualname__", type(value).__name__)
