"""Which parameters are gathered together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import thunder_xform as tx


def unit_paths(module: torch.nn.Module, units: str | Sequence[str | type]) -> tuple[str, ...]:
    """Dotted names of the modules that are units; what lies outside all of them forms one more unit.

    Raises:
        PipelineError: a listed name matches no module.
    """
    if units == "block":
        return tuple(_blocks(module, ""))
    if units == "layer":
        return tuple(n for n, m in module.named_modules() if n and next(m.parameters(recurse=False), None) is not None)
    if units == "none":
        return ()
    found = []
    for wanted in units:
        matches = [n for n, m in module.named_modules() if n and wanted in (n, type(m).__name__)]
        if not matches:
            known = sorted({type(m).__name__ for m in module.modules()})
            raise tx.errors.PipelineError(
                f"Plugin 'fsdp' got the unit {wanted!r}, but no module has that name or class.",
                f"Use a dotted module name or one of the classes {', '.join(known)}.",
            )
        found += matches
    return tuple(dict.fromkeys(found))


def _blocks(module: torch.nn.Module, path: str) -> Iterable[str]:
    """Children of the outermost containers that repeat one module class."""
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and _repeats(module, child):
            yield where
        else:
            yield from _blocks(child, where)


def _repeats(container: torch.nn.Module, child: torch.nn.Module) -> bool:
    has_children = next(child.children(), None) is not None
    return has_children and sum(type(c) is type(child) for c in container.children()) > 1


def unit_of(name: str, paths: Iterable[str], units: str | Sequence[str | type]) -> str:
    """The unit of the parameter ``name``: the innermost unit module that contains it, ``""`` for none."""
    if units == "none":
        return name
    return max((p for p in paths if name.startswith(p + ".")), key=len, default="")
