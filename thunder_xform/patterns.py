"""Options that choose modules by name, as ``target_modules`` of PEFT does.

A pattern is a text, a regular expression for whole names, or a list of names and dotted suffixes of names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thunder_xform.context import Context

Pattern = str | Sequence[str]

__all__ = ["Pattern", "check", "matches", "normalized", "resembling"]


def normalized(option: str, value: Pattern) -> str | tuple[str, ...]:
    """A regular expression as it is, names as a tuple. For the ``__post_init__`` of options.

    Raises:
        ValueError: neither; it names the option.
    """
    if not isinstance(value, str):
        names = tuple(value)
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"`{option}` is {value!r}, but it is a regular expression or a list of names")
        return names
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"`{option}` is {value!r}, which as text is a regular expression, but not a valid one ({error}); "
            f"write a list for names"
        ) from None
    return value


def matches(pattern: Pattern, name: str) -> bool:
    """Whether a pattern chooses the module of that name, by PEFT's rule."""
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    return any(name == part or name.endswith(f".{part}") for part in pattern)


def check(option: str, pattern: Pattern, candidates: Iterable[str], ctx: Context) -> None:
    """Refuse a pattern, or a name in one, that matches no module of the model: it is most likely misspelt.

    Args:
        option: whose value the pattern is.
        pattern: the value.
        candidates: names of the modules that it could be meant for, and other values that the option takes.
        ctx: of the plugin.

    Raises:
        OptionError: with the closest of the candidates.
    """
    names = [name for name, _ in ctx.module.named_modules(remove_duplicate=False)]
    for part in [pattern] if isinstance(pattern, str) else pattern:
        if not any(matches(part if isinstance(pattern, str) else (part,), name) for name in names):
            raise ctx.option_error(
                option,
                part,
                f"`{option}` {part!r} matches no module of {type(ctx.module).__name__}.",
                f"Closest names: {', '.join(map(repr, resembling(part, candidates)))}.",
            )


def resembling(text: str, names: Iterable[str]) -> list[str]:
    """Up to five last components and full names that resemble ``text``; the first ones if none does."""
    names = list(names)
    known = dict.fromkeys([*(name.rpartition(".")[2] for name in names), *names])
    return difflib.get_close_matches(text, known, n=5, cutoff=0.5) or list(known)[:5]
