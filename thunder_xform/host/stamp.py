"""What a compiled entry takes for granted of the attributes that its trace read, compared on every call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from thunder_xform.host.reachable import ARRAYS

_LARGEST = 1000
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
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


class _Sized:
    """Equals containers of one length; for those too large to compare on every call."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._length = len(value)

    def __eq__(self, other: Any) -> bool:
        return hasattr(other, "__len__") and len(other) == self._length


MISSING = _Missing()
_ANY_TENSOR = _AnyTensor()


class Stamp:
    """The attributes that a trace read, as they were.

    Args:
        reads: an object, the name of an attribute, and :func:`expected` of it when it was read.
        outside: the same of other dictionaries and keys in them.
        modules: all modules; a hook that is added to one changes what the model computes.
    """

    def __init__(
        self,
        reads: Iterable[tuple[Any, str, Any]],
        outside: Iterable[tuple[dict[Any, Any], Any, Any]],
        modules: Iterable[torch.nn.Module],
    ) -> None:
        own: list[tuple[dict[Any, Any], Any, Any]] = [*outside]
        inherited: list[tuple[type, str]] = []
        for owner, name, value in reads:
            own.append((vars(owner), name, value))
            if name not in vars(owner) and _is_data(getattr(type(owner), name, MISSING)):
                inherited.append((type(owner), name))
        self._dicts, self._names = [d for d, _, _ in own], [n for _, n, _ in own]
        self._values = [value for _, _, value in own]
        self._defaults = [MISSING] * len(own)
        self._classes, self._class_names = [c for c, _ in inherited], [n for _, n in inherited]
        self._class_values = [expected(getattr(c, n)) for c, n in inherited]
        self._hooks = [vars(m)[name] for m in modules for name in _HOOKS]
        self._hook_counts = list(map(len, self._hooks))

    def holds(self) -> bool:
        """Whether all attributes are what they were."""
        try:
            # One pass in C over each: the expected value asks, because tensors do not answer.
            return (
                self._values == [*map(dict.get, self._dicts, self._names, self._defaults)]
                and self._hook_counts == [*map(len, self._hooks)]
                and self._class_values == [*map(getattr, self._classes, self._class_names)]
            )
        except Exception:
            return False


def _is_data(value: Any) -> bool:
    return value is not MISSING and not callable(value) and not hasattr(value, "__get__")


def expected(value: Any) -> Any:
    """What to compare with: the value, or a copy of a container or an array, which may change in place."""
    if isinstance(value, torch.Tensor):
        return _ANY_TENSOR
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
        if len(value) > _LARGEST:
            return _Sized(value)
        if isinstance(value, dict):
            return {key: expected(item) for key, item in value.items()}
        if isinstance(value, (set, frozenset)):
            return set(value)
        items = [expected(item) for item in value]
        return items if isinstance(value, list) else tuple(items) if isinstance(value, tuple) else deque(items)
    if isinstance(value, ARRAYS):
        return _SameContent(value)
    if isinstance(value, _PLAIN) or _compares_identity(value):
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
