"""The prologue's part of computation inputs: read from a fresh trace, and written as the ledger has them."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Any

from thunder.core import prims
from thunder.core.devices import to_device
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

from thunder_xform.host.distributed import unpack_parts
from thunder_xform.host.inputs import InputTable
from thunder_xform.host.ledger import MODEL, MODEL_STAGE, Ledger
from thunder_xform.host.version import Version

_UNPACK_STATE = (prims.unpack_parameter, prims.unpack_buffer)


def read_inputs(
    ledger: Ledger, prologue: TraceCtx, computation: TraceCtx, roots: Collection[str] | None
) -> tuple[TraceCtx, InputTable]:
    """The table of a fresh trace. Tied tensors, which Thunder unpacks once a name, become one input.

    Args:
        ledger: the model's.
        prologue: where parameters are unpacked.
        computation: where they are used.
        roots: the prologue's proxies that stand for the model, where it unpacks other modules too; else None.
    """
    by_proxy = {
        bsym.output.name: ledger.canonical(bsym.args[1])
        for bsym in prologue.bound_symbols
        if _unpacks_state_of(bsym, ledger, roots)
    }
    stored: dict[str, TensorProxy] = {}
    others: list[Any] = []
    swaps: dict[Any, TensorProxy] = {}
    for argument in computation.args:
        name = by_proxy.get(argument.name)
        if name is None:
            others.append(argument)
        elif name in stored:
            swaps[variableify(argument)] = stored[name]
        else:
            stored[name] = argument
    table = InputTable(ledger, MODEL_STAGE, MODEL, stored, dict(stored), tuple(others), roots)
    body = [
        b.from_bsym_swap_proxies(swaps) for b in computation.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL
    ]
    return table.close(from_trace(computation), body[:-1], body[-1], computation.args), table


def derive_prologue(prologue: TraceCtx, table: InputTable, computation: TraceCtx, ledger: Ledger) -> TraceCtx:
    """The prologue that unpacks and checks exactly the inputs of ``computation``.

    Parameters that the model only asked for their shape or dtype are no inputs; their checks, too, follow the ledger.
    An input that is unpacked without a check, because a plugin or another transform removed it, stays so.
    """
    new = from_trace(prologue)
    inputs, versions = table.inputs, table.versions()
    to_epilogue = {proxy.name for proxy in tree_flatten(prologue.bound_symbols[-1].args[0][1])[0]}
    checked_proxies = {b.args[0].name for b in prologue.bound_symbols if b.sym is prims.check_tensor_shape_and_metadata}
    unchecked: set[str] = set()
    unpacked: set[str] = set()
    inspected: dict[str, Version] = {}
    root: Any = None
    body: list[BoundSymbol] = []
    with tracectx(new):
        for bsym in prologue.bound_symbols[:-1]:
            if bsym.sym is prims.unpack_thunder_module and (table.roots is None or bsym.output.name in table.roots):
                root = bsym.output
            if bsym.sym is unpack_parts and (table.roots is None or bsym.args[0].name in table.roots):
                # Those that are no longer only inspected are unpacked below.
                named = list(zip(bsym.args[1:], bsym.output, strict=True))
                unpacked.update(o.name for n, o in named if n in inputs)
                unchecked.update(n for n, o in named if n in inputs and o.name not in checked_proxies)
                root = bsym.args[0]
                if not (kept := [(n, o) for n, o in named if n not in inputs]):
                    continue
                inspected |= {o.name: table.version(n) for n, o in kept}
                bsym = _unpack_parts(root, kept)
            elif _unpacks_state_of(bsym, ledger, table.roots):
                name = ledger.canonical(bsym.args[1])
                root = bsym.args[0]
                if name in inputs:
                    unpacked.add(bsym.output.name)
                    if bsym.output.name not in checked_proxies:
                        unchecked.add(name)
                    if bsym.output.name in to_epilogue and inputs[name].name != bsym.output.name:
                        body.append(bsym)
                    continue
                inspected[bsym.output.name] = table.version(name)
                if ledger.distributed(name) is not None:
                    bsym = _unpack_parts(root, [(name, bsym.output)])
            if bsym.sym is prims.check_tensor_shape_and_metadata:
                checked = bsym.args[0]
                if checked.name in unpacked:
                    continue
                if checked.name in inspected:
                    bsym = _check(checked, inspected[checked.name])
            body.append(bsym)
        distributed = [(n, proxy) for n, proxy in inputs.items() if ledger.distributed(n) is not None]
        if distributed:
            body.append(_unpack_parts(root, distributed))
        for name, proxy in inputs.items():
            new.names.add(proxy.name)
            version = versions[name]
            if ledger.distributed(name) is None:
                unpack = prims.unpack_parameter if version.kind == "parameter" else prims.unpack_buffer
                body.append(unpack.bind(root, name, output=proxy))
            if name not in unchecked:
                body.append(_check(proxy, version))
    last = prologue.bound_symbols[-1]
    new.bound_symbols = [*body, last.from_bsym(args=((tuple(computation.args), last.args[0][1]),))]
    new.scopes = [new.bound_symbols]
    return new


def _unpack_parts(root: Any, named: Sequence[tuple[str, TensorProxy]]) -> BoundSymbol:
    return unpack_parts.bind(root, *[name for name, _ in named], output=tuple(proxy for _, proxy in named))


def without_checks(prologue: TraceCtx, names: Collection[str], roots: Collection[str] | None) -> TraceCtx:
    """A prologue that does not check the parameters and buffers of the ``names`` of the model, the ``roots``."""
    proxies = {b.output.name for b in prologue.bound_symbols if _unpacks_state_of(b, names, roots)}
    for bsym in prologue.bound_symbols:
        if bsym.sym is unpack_parts and (roots is None or bsym.args[0].name in roots):
            proxies |= {o.name for n, o in zip(bsym.args[1:], bsym.output, strict=True) if n in names}
    new = from_trace(prologue)
    new.bound_symbols = [
        b
        for b in prologue.bound_symbols
        if b.sym is not prims.check_tensor_shape_and_metadata or b.args[0].name not in proxies
    ]
    new.scopes = [new.bound_symbols]
    return new


def _unpacks_state_of(bsym: BoundSymbol, names: Container[object], roots: Collection[str] | None) -> bool:
    if bsym.sym not in _UNPACK_STATE or bsym.args[1] not in names:
        return False
    return roots is None or bsym.args[0].name in roots


def _check(proxy: TensorProxy, version: Version) -> BoundSymbol:
    """The prologue's check that a live tensor is what the ledger records."""
    device = to_device(version.device).device_str()
    return prims.check_tensor_shape_and_metadata.bind(
        proxy, version.stored_shape, device, version.dtype, version.requires_grad, output=None
    )
