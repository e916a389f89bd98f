"""What a compiled entry takes for granted, read from its prologue, so that a recompilation can be explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy
from thunder.core.trace import TraceCtx

_CHECK_TENSOR = prims.check_tensor_shape_and_metadata


def is_compiling(module: ThunderModule) -> bool:
    """Whether the compilation under way is that of ``module``, not of a function or another model."""
    data = get_compile_data()
    return data is not None and data.fn is module._model


def conditions(prologue: TraceCtx) -> dict[str, str]:
    """What a fresh prologue checks, and for which value, both in the user's terms.

    >>> conditions(prologue)
    {'number of args': '1', 'input x': '(2, 3) torch.float32 on cpu', 'module dropout.p': '0.5'}
    """
    subjects: dict[str, str] = {}
    found: dict[str, str] = {}
    for bsym in prologue.bound_symbols:
        for output in bsym.flat_proxy_outs:
            subjects[output.name] = _subject(bsym, subjects)
        if bsym.sym.name.startswith("check_"):
            target = bsym.args[0]
            if isinstance(target, Proxy):
                subject = subjects.get(target.name, target.name)
                if bsym.sym.name == "check_len":
                    subject = f"number of {subject}"
                found[subject] = _expected(bsym)
    return found


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    """One phrase for each condition that differs.

    Where a value changed, conditions that only one of the two has are its consequence and left out.
    """
    changed = tuple(f"{name}: {old[name]} -> {new[name]}" for name in new if old.get(name, new[name]) != new[name])
    only_one = sorted(new.keys() ^ old.keys())
    return changed or tuple(f"{name}: {'now' if name in new else 'no longer'} checked" for name in only_one)


def _subject(bsym: Any, subjects: dict[str, str]) -> str:
    """Words for what an unpacking operator yields."""
    sym, args = bsym.sym, bsym.args
    if sym is prims.unpack_parameter or sym is prims.unpack_buffer:
        return f"{'parameter' if sym is prims.unpack_parameter else 'buffer'} {args[1]}"
    if len(args) < 2 or not isinstance(args[0], Proxy):
        return str(bsym.output.name)
    owner = subjects.get(args[0].name, args[0].name)
    if owner == "cache_info":
        return str(args[1])
    if sym is prims.unpack_getitem:
        if owner == "args" and not bsym.output.name[1:].isdigit():
            return f"input {bsym.output.name}"
        return f"{owner}[{args[1]!r}]"
    return f"{owner} {args[1]}" if owner == "module" else f"{owner}.{args[1]}"


def _expected(bsym: Any) -> str:
    """Words for what a check compares with."""
    expected = bsym.args[1:]
    if bsym.sym is _CHECK_TENSOR:
        shape, device, dtype, requires_grad = expected
        return f"{tuple(shape)} {dtype} on {device}{' that requires grad' if requires_grad else ''}"
    return ", ".join(repr(value) for value in expected)
