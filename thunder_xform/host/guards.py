"""Guards: the conditions under which a compiled entry is valid, compared at the very top of its prologue.

Thunder tries its compiled entries newest first and takes the first whose prologue does not raise. The guard is the
prologue's first operator, so an entry for another mode fails within microseconds, before a parameter is unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain, count
from typing import Any

import torch
from thunder.core import prims
from thunder.core.trace import TraceCtx, from_trace, tracectx

from thunder_xform.host.arguments import signature
from thunder_xform.host.functions import call_arguments
from thunder_xform.host.operators import python_call

#: Modules of torch.nn that compute the same in training and in evaluation.
_MODE_FREE = (
    torch.nn.Linear,
    torch.nn.Embedding,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.GELU,
    torch.nn.ReLU,
    torch.nn.SiLU,
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.Identity,
)


class GuardMiss(Exception):
    """The entry was compiled under another key. Thunder catches it and tries the next entry."""


def training_modes(module: torch.nn.Module) -> Callable[[], tuple[bool, ...]]:
    """A cheap reader of the train/eval flags of all modules whose computation may depend on them."""
    modules = [m for i, m in enumerate(module.modules()) if i == 0 or type(m) not in _MODE_FREE]
    return lambda: tuple([m.training for m in modules])


def with_check(prologue: TraceCtx, name: str, holds: Callable[[], bool], *, first: bool = False) -> TraceCtx:
    """A prologue that raises :class:`GuardMiss` unless ``holds()``; evaluated first or last among its checks."""
    # Takes `args`, the first thing unpacked: transforms that prune prologues expect every operator to have an input.
    start, args = next(
        (i, b.output) for i, b in enumerate(prologue.bound_symbols) if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL
    )
    position = start + 1 if first else len(prologue.bound_symbols) - 1
    return _inserted(prologue, name, lambda _: holds(), args, position)


def with_argument_check(prologue: TraceCtx, layout: Callable[[Any], Any] | None = None) -> TraceCtx:
    """A prologue that raises :class:`GuardMiss` for other arguments than those of the call that is being compiled.

    What is not a tensor is compared: Thunder leaves most kinds of it unchecked. Of tensors, what ``layout`` makes of
    all arguments.
    """
    given: dict[str, Any] = dict(zip(("args", "kwargs"), call_arguments(), strict=True))
    # Transforms that prune prologues drop `kwargs` where no operator reads it.
    unpacked = {
        b.output.name: (i, b.output)
        for i, b in enumerate(prologue.bound_symbols)
        if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL
    }

    def seen(values: dict[str, Any]) -> Any:
        return signature(**values), layout and layout(values)

    expected = seen({name: given[name] for name in unpacked})
    position, subjects = max(i for i, _ in unpacked.values()) + 1, [proxy for _, proxy in unpacked.values()]

    def holds(values: list[Any]) -> bool:
        return bool(seen(dict(zip(unpacked, values, strict=True))) == expected)

    return _inserted(prologue, "check_arguments", holds, subjects, position)


def with_module_checks(prologue: TraceCtx, roots: Collection[str], module: torch.nn.Module) -> TraceCtx:
    """A prologue that raises :class:`GuardMiss` unless each of its ``roots`` unpacks as ``module``."""
    for root in roots:
        position, proxy = next(
            (i, b.output)
            for i, b in enumerate(prologue.bound_symbols)
            if any(o.name == root for o in b.flat_proxy_outs) and b.sym is prims.unpack_thunder_module
        )
        prologue = _inserted(prologue, "check_module", lambda found: found is module, proxy, position + 1)
    return prologue


def _inserted(prologue: TraceCtx, name: str, holds: Callable[[Any], bool], subject: Any, position: int) -> TraceCtx:
    taken = {b.sym.name for b in prologue.bound_symbols}
    # The name leads to the function when the prologue runs: two checks of one name would be one.
    name = next(n for n in chain([name], (f"{name}_{i}" for i in count(2))) if n not in taken)

    def run(value: Any) -> None:
        if not holds(value):
            raise GuardMiss(name)

    symbol = python_call(name, run)
    new = from_trace(prologue)
    with tracectx(new):
        check = symbol.bind(subject, output=None)
    new.bound_symbols = [*prologue.bound_symbols[:position], check, *prologue.bound_symbols[position:]]
    new.scopes = [new.bound_symbols]
    return new


def insert_guard(prologue: TraceCtx, current_key: Callable[[], Any]) -> TraceCtx:
    """A prologue that first of all compares ``current_key()`` with its value now."""
    expected = current_key()
    return with_check(prologue, "check_pipeline_state", lambda: bool(current_key() == expected), first=True)
