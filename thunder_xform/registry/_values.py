"""Check option values against the annotations of their dataclass."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

__all__ = ["Mismatch", "convert"]


class Mismatch(Exception):
    """A value does not have the annotated form; the message is the form wanted."""


def convert(value: Any, hint: Any) -> Any:
    """`value` as the annotation `hint` wants it; ints are taken for floats, and lists for tuples and back.

    An annotation that this function does not know accepts anything.

    Raises:
        Mismatch: with the form wanted.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (None, type(None)):
        return _require(value is None, value, hint)
    if hint is float:
        wanted = isinstance(value, int | float) and not isinstance(value, bool)
        return float(_require(wanted, value, hint))
    if hint is int:
        return _require(isinstance(value, int) and not isinstance(value, bool), value, hint)
    if hint in (bool, str):
        return _require(isinstance(value, hint), value, hint)
    if origin is Literal:
        return _require(any(type(value) is type(a) and value == a for a in args), value, hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, hint, args)
    if hint in (tuple, list, Sequence) or origin in (tuple, list, Sequence):
        return _convert_sequence(value, hint, origin or hint, args)
    if hint in (dict, Mapping) or origin in (dict, Mapping):
        _require(isinstance(value, Mapping), value, hint)
        key, entry = args or (Any, Any)
        return {_part(k, key, hint): _part(v, entry, hint) for k, v in value.items()}
    if origin is typing.Annotated:
        return convert(value, args[0])
    if isinstance(hint, type) and origin is None and hint is not object:
        return _require(isinstance(value, hint) or typing.is_typeddict(hint), value, hint)
    return value


def describe(hint: Any) -> str:
    """The annotation in words, such as ``'a', 'b' or None``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (None, type(None)):
        return "None"
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, args))
    name = getattr(hint, "__name__", None) or str(hint)
    if origin is not None and args:
        return f"{name}[{', '.join('...' if arg is Ellipsis else describe(arg) for arg in args)}]"
    return name


def _convert_union(value: Any, hint: Any, args: tuple[Any, ...]) -> Any:
    # An exact member comes first, so that `int | float` leaves an int alone.
    for arg in sorted(args, key=lambda arg: arg is not type(value)):
        try:
            return convert(value, arg)
        except Mismatch:
            continue
    raise Mismatch(describe(hint))


def _convert_sequence(value: Any, hint: Any, kind: Any, args: tuple[Any, ...]) -> Any:
    _require(isinstance(value, tuple | list), value, hint)
    if kind is tuple and args and args[-1] is not Ellipsis:
        fixed = () if args == ((),) else args
        _require(len(value) == len(fixed), value, hint)
        return tuple(_part(v, arg, hint) for v, arg in zip(value, fixed, strict=True))
    entry = args[0] if args else Any
    return (list if kind is list else tuple)(_part(v, entry, hint) for v in value)


def _part(value: Any, hint: Any, whole: Any) -> Any:
    try:
        return convert(value, hint)
    except Mismatch:
        raise Mismatch(describe(whole)) from None


def _require(condition: bool, value: Any, hint: Any) -> Any:
    if not condition:
        raise Mismatch(describe(hint))
    return value
