"""Names of modules by pattern, as PEFT reads them, and errors about patterns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import torch

import thunder_xform as tx
from thunder_xform_lora._kinds import layer_of
from thunder_xform_lora.options import ALL_LINEAR, Options

Pattern = str | Sequence[str]


def matches(pattern: Pattern, path: str) -> bool:
    """Whether a module's name matches, by PEFT's rule: a text is a regular expression for the whole name, a
    list holds names and dotted suffixes.
    """
    if isinstance(pattern, str):
        return re.fullmatch(pattern, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in pattern)


def targeted(options: Options, path: str) -> bool:
    """Whether `target_modules` selects a module, by PEFT's rule: what it names in full has any index."""
    wanted = options.target_modules
    if isinstance(wanted, str) or path in wanted or (indices := options.layer_indices) is None:
        return matches(wanted, path)
    return matches(wanted, path) and _index(options.layer_patterns, path) in indices


def _index(patterns: Sequence[str], path: str) -> int | None:
    """The number of the layer in its stack: the first after one of the names, or after any."""
    expressions = [rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\." for pattern in patterns]
    for expression in expressions or [r".*?\.[^.]*\.(?P<index>\d+)\."]:
        if found := re.match(expression, path):
            return int(found["index"])
    return None


def to_save(options: Options, path: str) -> bool:
    """Whether a module is one of `modules_to_save`."""
    return any(path.endswith(name) for name in options.modules_to_save or ())


def inside_saved(options: Options, path: str) -> bool:
    """Whether a module is, or is inside, one that trains whole and therefore gets no adapter."""
    return any(re.match(rf"(^|.*\.){name}($|\..*)", path) for name in options.modules_to_save or ())


def check_patterns(option: str, pattern: Pattern, modules: dict[str, torch.nn.Module], ctx: tx.Context) -> None:
    """Refuse a pattern that matches no module at all: it is most likely misspelt."""
    for part in [pattern] if isinstance(pattern, str) else [(name,) for name in pattern]:
        if not any(matches(part, path) for path in modules):
            text = part if isinstance(part, str) else part[0]
            raise error(
                ctx,
                option,
                text,
                f"`{option}` {text!r} matches no module of {type(ctx.module).__name__}.",
                f"Closest names: {', '.join(map(repr, _closest(text, modules)))}.",
            )


def _closest(text: str, modules: dict[str, torch.nn.Module]) -> list[str]:
    paths = [path for path, module in modules.items() if layer_of(module)]
    return resembling(text, [ALL_LINEAR, *paths])


def resembling(text: str, paths: Sequence[str]) -> list[str]:
    """Last components and full names of layers that resemble ``text``."""
    names = dict.fromkeys([*(path.rpartition(".")[2] for path in paths), *paths])
    return difflib.get_close_matches(text, names, n=5, cutoff=0.5) or list(names)[:5]


def error(ctx: tx.Context, option: str, value: object, problem: str, remedy: str) -> tx.errors.OptionError:
    return tx.errors.OptionError(
        problem, remedy, plugin=ctx.plugin, distribution=ctx.distribution, option=option, value=repr(value)
    )
