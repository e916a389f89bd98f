"""Checks between plugins: is what a plugin left consistent, and did it do only what it declared?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_xform.host.inputs import InputTable, live_mismatch, matches
from thunder_xform.host.ledger import Ledger
from thunder_xform.host.notes import Notes
from thunder_xform.host.operators import operator_of
from thunder_xform.host.version import Version

_UNPACK = prims.PrimIDs.UNPACK_TRIVIAL


def inconsistencies(prologue: TraceCtx, computation: TraceCtx, table: InputTable, ledger: Ledger) -> Iterator[str]:
    """Everything that does not fit together, one phrase each; nothing if all is well."""
    yield from _inputs_match_ledger(table)
    yield from _arguments_agree(prologue, computation)
    yield from _proxies_are_produced_once(computation, "computation")
    yield from _proxies_are_produced_once(prologue, "prologue")
    yield from _side_effects_survive(computation)
    yield from _checks_match(table, ledger)


def _inputs_match_ledger(table: InputTable) -> Iterator[str]:
    versions = table.versions()
    for name, proxy in table.inputs.items():
        if not matches(proxy, versions[name]):
            yield (
                f"input {proxy.name!r} is {tuple(proxy.shape)} {proxy.dtype} requires_grad={proxy.requires_grad}, but "
                f"parameter {name!r} is stored as {versions[name].stored_shape} {versions[name].dtype} "
                f"requires_grad={versions[name].requires_grad}; use `restore` or `Edit.stored`"
            )


def _arguments_agree(prologue: TraceCtx, computation: TraceCtx) -> Iterator[str]:
    arguments = [a.name for a in computation.args]
    unpacked = [b.output.name for b in computation.bound_symbols if b.sym.id == _UNPACK]
    if sorted(arguments) != sorted(unpacked):
        yield f"arguments {sorted(set(arguments) ^ set(unpacked))} of the computation are not unpacked"
    flat_args = [a.name for a in computation.bound_symbols[-1].args[0]["flat_args"]]
    # What is no argument stands for one that the model updates in place.
    standing = [a if f not in arguments else f for f, a in zip(flat_args, arguments, strict=False)]
    if len(flat_args) != len(arguments) or standing != arguments:
        missing = [a for a in arguments if a not in flat_args]
        yield f"flat_args lacks or reorders arguments: missing {missing}"
    passed = prologue.bound_symbols[-1].args[0][0]
    if [p.name for p in passed] != arguments:
        yield (
            f"the prologue passes {len(passed)} values, the computation takes {len(arguments)}: "
            f"{sorted({p.name for p in passed} ^ set(arguments))} differ"
        )
    for given, taken in zip(passed, computation.args, strict=False):
        if getattr(given, "shape", None) != getattr(taken, "shape", None):
            yield f"the prologue passes {given.name!r} as {given.shape}, the computation takes {taken.shape}"


def _proxies_are_produced_once(trace: TraceCtx, which: str) -> Iterator[str]:
    produced: dict[str, tuple[int, ...] | None] = {}
    for bsym in trace.bound_symbols:
        if bsym.sym.id != _UNPACK:
            for argument in bsym.flat_proxy_args:
                if argument.name not in produced:
                    yield f"{bsym.sym.name!r} in the {which} reads {argument.name!r}, which nothing produces before it"
                elif produced[argument.name] != _shape(argument):
                    yield (
                        f"{bsym.sym.name!r} in the {which} reads {argument.name!r} as {_shape(argument)}, but it is "
                        f"{produced[argument.name]}"
                    )
        if bsym.sym.id == prims.PrimIDs.RETURN:
            continue
        consumed = {a.name for a in bsym.flat_proxy_args}
        for output in bsym.flat_proxy_outs:
            if output.name in produced and output.name not in consumed:
                yield f"{output.name!r} is produced twice in the {which}, the second time by {bsym.sym.name!r}"
            produced[output.name] = _shape(output)


def _side_effects_survive(computation: TraceCtx) -> Iterator[str]:
    read = {a.name for b in computation.bound_symbols for a in b.flat_proxy_args}
    for bsym in computation.bound_symbols:
        operator = operator_of(bsym.sym)
        if operator is not None and operator.side_effects and read.isdisjoint(o.name for o in bsym.flat_proxy_outs):
            yield (
                f"{bsym.sym.name!r} has side effects, but nothing reads what it returns, so it would vanish when the "
                f"computation is differentiated"
            )


def _shape(proxy: Proxy) -> tuple[int, ...] | None:
    shape = getattr(proxy, "_shape", None)
    return None if shape is None else tuple(shape)


def _checks_match(table: InputTable, ledger: Ledger) -> Iterator[str]:
    for name, version in table.versions().items():
        if version.owner == ledger.latest(name).owner:
            mismatch = live_mismatch(version, ledger.tensor(name))
            if mismatch:
                yield f"the live tensor of {name!r} {mismatch}"


def state_effects(
    before: Mapping[str, tuple[Version, Hashable]], after: Mapping[str, tuple[Version, Hashable]]
) -> dict[str, str]:
    """Effects on parameters and buffers, each with an example, between two snapshots of versions and fingerprints."""
    found: dict[str, str] = {}
    for name, (version, values) in after.items():
        kind = "buffers" if version.kind == "buffer" else "params"
        if name not in before:
            found.setdefault(f"{kind}.set", f"adds {name!r}")
            continue
        old, old_values = before[name]
        layout, old_layout = (version.stored_shape, version.layout), (old.stored_shape, old.layout)
        for effect, a, b in (
            ("shape", old.shape, version.shape),
            ("layout", old_layout, layout),
            ("dtype", old.dtype, version.dtype),
            ("device", old.device, version.device),
            ("requires_grad", old.requires_grad, version.requires_grad),
        ):
            if a != b:
                found.setdefault(f"{kind}.{effect}", f"changes {name!r} from {a} to {b}")
        if values != old_values and layout == old_layout:
            found.setdefault(f"{kind}.data", f"replaces the values of {name!r}")
    return found


def trace_effects(before: TraceCtx, after: TraceCtx, notes: Notes) -> dict[str, str]:
    """Effects on a trace, each with an example.

    ``trace.collectives`` for a collective that was inserted, ``trace.compute.linear`` for whatever takes the place of
    an operator ``linear``, ``trace.compute`` for what is inserted elsewhere, ``trace.saved`` for a choice of what the
    backward keeps. A call of an operator that is called again as it was is no effect.
    """
    found: dict[str, str] = {}
    old = Counter(_key(bsym, notes) for bsym in _operators(before))
    new = Counter(_key(bsym, notes) for bsym in _operators(after))
    for bsym in _operators(after):
        if new[key := _key(bsym, notes)] > old[key]:
            new[key] -= 1
            known = operator_of(bsym.sym)
            collective = known is not None and known.collective
            found.setdefault("trace.collectives" if collective else _place(bsym, notes), f"inserts {bsym.sym.name!r}")
    for bsym in _operators(before):
        if old[key := _key(bsym, notes)] > new[key]:
            old[key] -= 1
            found.setdefault(f"trace.compute.{bsym.sym.name}", f"removes {bsym.sym.name!r}")
    for wish in notes.wishes[:1]:
        found["trace.saved"] = wish
    return found


def _operators(trace: TraceCtx) -> Iterator[BoundSymbol]:
    return (b for b in trace.bound_symbols if b.sym.id not in (_UNPACK, prims.PrimIDs.RETURN))


def _key(bsym: BoundSymbol, notes: Notes) -> tuple[str, tuple[str, ...]]:
    return bsym.sym.name, tuple(notes.same.get(o.name, o.name) for o in bsym.flat_proxy_outs)


def _place(bsym: BoundSymbol, notes: Notes) -> str:
    place = next((notes.places[o.name] for o in bsym.flat_proxy_outs if o.name in notes.places), None)
    return "trace.compute" if place is None else f"trace.compute.{place}"


def undeclared(found: Mapping[str, str], declared: Collection[str]) -> Iterator[str]:
    """Effects that no declared one covers; ``params`` covers ``params.layout``."""
    for effect, example in found.items():
        if not any(effect == d or effect.startswith(d + ".") for d in declared):
            yield f"{example}, which is the effect {effect!r}, but the manifest declares only {sorted(declared)}"
