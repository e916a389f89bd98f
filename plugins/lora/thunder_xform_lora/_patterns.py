"""Names of layers in the options that PEFT has beside patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from thunder_xform.patterns import matches
from thunder_xform_lora.options import Options


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
