"""The text form of a request, ``lora(r=8) + fsdp(zero=3)``: Python expressions, parsed but never run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from thunder_xform.errors import RequestSyntaxError

if TYPE_CHECKING:
    import ast

__all__ = ["parse", "render", "type_name"]

_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*")
_OPAQUE = re.compile(r"<[\w.]+>")


def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The ``(name, options)`` pairs of `text`, in its order.

    Raises:
        RequestSyntaxError: with the column at which reading stopped.
    """
    if single := _NAME.fullmatch(text):
        return [(single[1], {})]
    if not text.strip():
        raise RequestSyntaxError(
            "the request is empty.", "Name a plugin; an empty list stands for a pipeline without any.", text=text
        )
    return _Parser(text).items()


def render(items: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """The text that `parse` reads back; a value that is no literal shows as ``<its.type>``."""
    return " + ".join(
        f"{name}({', '.join(f'{key}={_literal(options[key])}' for key in sorted(options))})" if options else name
        for name, options in items
    )


def type_name(value: object) -> str:
    """The qualified name of the value's type."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _literal(value: object) -> str:
    match value:
        case None | bool() | str() | int():
            return repr(value)
        case float() if math.isinf(value):
            return "1e999" if value > 0 else "-1e999"
        case float() if not math.isnan(value):
            return repr(value)
        case tuple() | list():
            return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
        case Mapping():
            return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    return f"<{type_name(value)}>"


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text.replace("\n", " ")

    def items(self) -> list[tuple[str, dict[str, Any]]]:
        import ast

        try:
            # The parenthesis allows leading blanks; it shifts every column by one.
            tree = ast.parse(f"({self._text})", mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if opaque := _OPAQUE.search(self._text):
                raise RequestSyntaxError(
                    f"the request contains {opaque[0]}, which stands for an object that text cannot express.",
                    "Pass that object through options={...}.",
                    text=self._text,
                    position=opaque.start(),
                ) from None
            column = max((getattr(error, "offset", None) or 2) - 2, 0)
            self._fail(min(column, len(self._text)), "is not understood")
        # The operands of a sum nest to the left, as deep as there are plugins.
        pending, terms = [tree.body], []
        while pending:
            match pending.pop():
                case ast.BinOp(left=left, op=ast.Add(), right=right):
                    pending += (right, left)
                case node:
                    terms.append(self._term(node))
        return terms

    def _term(self, node: ast.expr) -> tuple[str, dict[str, Any]]:
        import ast

        match node:
            case ast.Name(id=name):
                return name, {}
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
                return name, self._options(name, keywords)
            case ast.Call(func=ast.Name(id=name), args=[first, *_]):
                self._fail(first.col_offset - 1, f"gives {name!r} an option without its name")
            case _:
                self._fail(node.col_offset - 1, "is not a plugin name")

    def _options(self, name: str, keywords: Iterable[ast.keyword]) -> dict[str, Any]:
        import ast

        options: dict[str, Any] = {}
        for keyword in keywords:
            column = keyword.col_offset - 1
            if keyword.arg is None:
                self._fail(column, "uses '**'")
            if keyword.arg in options:
                self._fail(column, f"gives {name!r} the option {keyword.arg!r} twice")
            try:
                value = ast.literal_eval(keyword.value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                self._fail(keyword.value.col_offset - 1, f"gives {keyword.arg!r} no literal")
            if not _expressible(value):
                self._fail(keyword.value.col_offset - 1, f"gives {keyword.arg!r} a {type_name(value)}")
            options[keyword.arg] = value
        return options

    def _fail(self, column: int, problem: str) -> NoReturn:
        # Columns of the parser count bytes.
        column = len(self._text.encode()[:column].decode(errors="ignore"))
        rest = self._text[column:].strip()
        what = repr(rest if len(rest) <= 24 else rest[:24] + "...") if rest else "the end"
        raise RequestSyntaxError(
            f"the request {self._text.strip()!r} {problem} at column {column + 1}: {what}.",
            text=self._text,
            position=column,
        )


def _expressible(value: object) -> bool:
    match value:
        case None | bool() | str() | int() | float():
            return True
        case tuple() | list():
            return all(map(_expressible, value))
        case Mapping():
            return all(_expressible(k) and _expressible(v) for k, v in value.items())
    return False
