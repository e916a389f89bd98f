"""How the commands print."""

from __future__ import annotations

import dataclasses
import json as _json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thunder_xform.errors import XformError, printable

__all__ = ["error_data", "print_error", "print_json", "print_table", "say"]


def say(text: str = "", *, problem: bool = False) -> None:
    """Print lines, on standard error for a `problem`; no escape sequence of a distribution's reaches the terminal."""
    print(printable(text, keep="\n"), file=sys.stderr if problem else sys.stdout)


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]], indent: str = "") -> None:
    """Left-aligned columns, two blanks apart; empty cells show as ``-``."""
    cells = [list(head), *([printable(str(cell)) if cell not in (None, "") else "-" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(indent + line.rstrip())


def print_json(data: Any) -> None:
    """Indented JSON; dataclasses and errors as objects, paths and other values as text."""
    print(_json.dumps(data, indent=2, default=_plain))


def print_error(error: XformError, *, json: bool) -> None:
    """The message on standard error, and with `json` the structured error on standard output."""
    say(f"error: {error}", problem=True)
    if json:
        print_json({"error": error_data(error)})


def error_data(error: XformError | None) -> dict[str, Any] | None:
    """The error's type and fields."""
    return None if error is None else {"type": type(error).__name__, "message": str(error), **error.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, XformError):
        return error_data(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, Path) else repr(value)
