"""Check option values against annotations: those of the loaded class, or their source text before loading.

A range is a text in the annotation, ``Annotated[int, ">= 1"]`` or ``Annotated[float, ">= 0, < 1"]``.
"""

from __future__ import annotations

import operator
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Union

from thunder_xform.errors import OptionError, closest

if TYPE_CHECKING:
    import ast

__all__ = ["convert_option", "static_hint"]


class _Mismatch(Exception):
    """A value does not have the annotated form."""


def convert_option(plugin: str, origin: str, option: str, value: Any, hint: Any) -> Any:
    """`value` as the annotation `hint` wants it; ints are taken for floats, and lists for tuples and back.

    An annotation that this module does not know accepts anything.

    Raises:
        OptionError: naming the plugin, its distribution (`origin`), the value, and the form wanted.
    """
    try:
        return _convert(value, hint)
    except _Mismatch:
        near = "".join(closest(word, set(_words(hint))) for word in _words(value))
        raise OptionError(
            f"the option {option!r} of {plugin!r} [{origin}] is {value!r}, which it does not take.{near}",
            f"Give {_describe(hint)}.",
            plugin=plugin,
            distribution=origin,
            option=option,
            value=repr(value),
        ) from None


def static_hint(annotation: str) -> Any:
    """The annotation that the source text stands for; parts with unknown names become ``Any``."""
    import ast

    try:
        return _evaluate(ast.parse(annotation, mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        return Any


_NAMES = {
    "Annotated": typing.Annotated,
    **{cls.__name__: cls for cls in (bool, dict, float, int, list, object, str, tuple, type)},
    "Literal": Literal,
    "Mapping": Mapping,
    "Optional": typing.Optional,
    "Sequence": Sequence,
    "Union": Union,
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
}


def _evaluate(node: ast.expr) -> Any:
    import ast

    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(text)):
            return static_hint(text)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _NAMES.get(name, Any)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return Union[_evaluate(left), _evaluate(right)]  # noqa: UP007
        case ast.Subscript(value=value, slice=part):
            base = _evaluate(value)
            if base is Any:
                return Any
            parts = part.elts if isinstance(part, ast.Tuple) else [part]
            args = tuple(
                ast.literal_eval(p)
                if base is Literal or _is_ellipsis(p) or (base is typing.Annotated and i)
                else _evaluate(p)
                for i, p in enumerate(parts)
            )
            return base[args if len(args) != 1 else args[0]]
    return Any


def _is_ellipsis(node: ast.expr) -> bool:
    import ast

    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _convert(value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    kind = origin or hint
    if hint is Any or hint is object:
        return value
    if hint is None or hint is type(None):
        return _require(value is None, value)
    if hint is float:
        return float(_require(isinstance(value, int | float) and not isinstance(value, bool), value))
    if hint is int:
        return _require(isinstance(value, int) and not isinstance(value, bool), value)
    if kind is Literal:
        return _require(any(type(value) is type(arg) and value == arg for arg in args), value)
    if kind in (Union, types.UnionType):
        return _convert_union(value, args)
    if kind in (tuple, list, Sequence):
        return _convert_sequence(value, kind, args)
    if kind in (dict, Mapping):
        key, entry = args or (Any, Any)
        return {_convert(k, key): _convert(v, entry) for k, v in _require(isinstance(value, Mapping), value).items()}
    if kind is typing.Annotated:
        converted = _convert(value, args[0])
        return _require(all(_within(converted, text) for text in args[1:]), converted)
    return _require(_may_be(value, hint), value)


def _convert_union(value: Any, args: tuple[Any, ...]) -> Any:
    # An exact member comes first, so that `float | int` leaves an int alone.
    for arg in sorted(args, key=lambda arg: arg is not type(value)):
        try:
            return _convert(value, arg)
        except _Mismatch:
            continue
    raise _Mismatch


def _convert_sequence(value: Any, kind: Any, args: tuple[Any, ...]) -> Any:
    _require(isinstance(value, tuple | list), value)
    if kind is tuple and args and args[-1] is not Ellipsis:
        _require(len(value) == len(args), value)
        return tuple(map(_convert, value, args))
    entry = args[0] if args else Any
    return (list if kind is list else tuple)(_convert(v, entry) for v in value)


_COMPARISON = re.compile(r"\s*(>=|<=|>|<)\s*(\S+?)\s*")
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def _within(value: Any, text: object) -> bool:
    """Whether a number is in the range that `text` states; other texts and objects state none."""
    parts = [_COMPARISON.fullmatch(part) for part in text.split(",")] if isinstance(text, str) else [None]
    try:
        return all(part is None or _COMPARE[part[1]](value, float(part[2])) for part in parts)
    except (TypeError, ValueError):
        return True


def _may_be(value: Any, hint: Any) -> bool:
    try:
        return isinstance(value, hint)
    except TypeError:  # A protocol, a type variable, ...: not for this module to judge.
        return True


def _require(condition: bool, value: Any) -> Any:
    if not condition:
        raise _Mismatch
    return value


def _describe(hint: Any) -> str:
    """The annotation in words, such as ``'a' or 'b' or None``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_describe, args))
    if origin is typing.Annotated:
        return " ".join(
            (_describe(args[0]), *(text.replace(",", " and") for text in args[1:] if isinstance(text, str)))
        )
    if hint is Ellipsis:
        return "..."
    name = getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(map(_describe, args))}]" if args else name


def _words(part: Any) -> list[str]:
    """The strings in a value, or among the literals of an annotation."""
    if isinstance(part, str):
        return [part]
    found = part if isinstance(part, tuple | list) else typing.get_args(part)
    return [word for entry in found for word in _words(entry)]
