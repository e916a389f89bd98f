"""What the backward recomputes: policies become marks that Thunder's differentiation obeys.

Marks are made once, after the last plugin, so that every plugin's operators are seen and no rewrite can lose one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from thunder.core import prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import _get_gradfn_and_executor

from thunder_xform.host.inputs import InputTable, updated_in_place
from thunder_xform.host.random import communicates, is_random, refuse_redrawn, runs_once

_OUTSIDE = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.RETURN)


def take_over_marks(trace: TraceCtx, table: InputTable) -> None:
    """Note what Thunder marked while tracing, in regions of ``torch.utils.checkpoint``, and take the marks off."""
    for bsym in trace.bound_symbols:
        for output in bsym.flat_proxy_outs:
            if ProxyTag.RECOMPUTE_IN_BACKWARD in output.tags:
                output.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
                table.notes.policies[output.name] = "recompute"


def marked(trace: TraceCtx, table: InputTable) -> TraceCtx:
    """The trace, marked for Thunder's differentiation.

    - What has the policy ``"recompute"`` is computed again in the backward.
    - So is what is computed from such values of parameters, from other parameters and from constants alone, up to the
      first operator that reads an activation: a cast, a transpose, a product of two parameters. Saved, it would take
      the memory that is spared by not saving what it comes from. Collectives are left out.
    - Random numbers, and what is computed from them alone, are kept instead: a mask is the same in the backward.
    - Values that the model returns are copied first, since Thunder recomputes nothing from a returned value on.

    Raises:
        PipelineError: an operator that Thunder would run again with other random numbers in any case.
    """
    differentiable = {a.name for a in trace.args if isinstance(a, TensorProxy) and a.requires_grad}
    if not differentiable:
        return trace
    operators = [bsym for bsym in trace.bound_symbols[:-1] if bsym.sym.id not in _OUTSIDE]
    refuse_redrawn(operators, differentiable, table.notes)
    policies = dict(table.notes.policies)
    body = [part for bsym in operators for part in _without_random_numbers(bsym, policies)]
    chosen = _chosen(trace, table, body, policies)
    if not chosen:
        return trace
    new = from_trace(trace)
    marks = {o.name for bsym in body if id(bsym) in chosen for o in bsym.flat_proxy_outs}
    copies: dict[str, Proxy] = {}
    made: list[BoundSymbol] = []

    def returned(value: Any) -> Any:
        if not isinstance(value, TensorProxy) or value.name not in marks:
            return value
        if value.name not in copies:
            new.push_scope([])
            copies[value.name] = prims.shallow_copy(value)
            made.extend(new.pop_scope())
        return copies[value.name]

    last = trace.bound_symbols[-1]
    with tracectx(new):
        last = last.from_bsym(args=({**last.args[0], "output": tree_map(returned, last.args[0]["output"])},))
    body = [
        bsym.from_bsym(tags={*bsym.tags, BoundSymbolTag.RECOMPUTE_IN_BACKWARD}) if id(bsym) in chosen else bsym
        for bsym in body
    ]
    return table.close(new, [*body, *made], last, trace.args)


def saved(forward: TraceCtx) -> list[Any]:
    """The proxies that a forward trace hands to its backward; empty if there is none."""
    last = forward.bound_symbols[-1]
    return list(last.args[1][0]) if len(last.args) > 1 else []


def _without_random_numbers(bsym: BoundSymbol, policies: dict[str, str]) -> Iterator[BoundSymbol]:
    """The operator; taken apart if it is to run again but for the random numbers that it draws."""
    wanted = any(policies.get(o.name) == "recompute" for o in bsym.flat_proxy_outs)
    if not wanted or not bsym.subsymbols or not is_random(bsym) or _get_gradfn_and_executor(bsym)[0] is not None:
        yield bsym
        return
    for part in bsym.subsymbols:
        policies |= {o.name: "recompute" for o in part.flat_proxy_outs if o.name not in policies}
        yield from _without_random_numbers(part, policies)


def _chosen(trace: TraceCtx, table: InputTable, body: list[BoundSymbol], policies: dict[str, str]) -> set[int]:
    """The operators of ``body`` to run again, by identity."""
    updated = updated_in_place(trace)
    parameters = {p.name for p in table.inputs.values()} - updated
    # Values that depend on nothing but parameters and constants; and those of them that come from a recomputed one.
    static, derived, random = set(parameters), set[str](), set[str]()
    producers: dict[str, BoundSymbol] = {}
    chosen: set[int] = set()
    for bsym in body:
        outputs = {o.name for o in bsym.flat_proxy_outs}
        inputs = {a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)}
        policy = next((policies[name] for name in outputs if name in policies), None)
        producers |= dict.fromkeys(outputs, bsym)
        if runs_once(bsym) or outputs & updated:
            if not inputs:
                random |= outputs
            continue
        if inputs and inputs <= random:
            random |= outputs
            continue
        alone = inputs <= static and (policy == "recompute" or not communicates(bsym))
        if alone:
            static |= outputs
        if policy == "recompute" or (policy is None and alone and inputs & derived):
            chosen.add(id(bsym))
            if alone and inputs:
                derived |= outputs
    return chosen | _constants(body, chosen, producers, static - parameters, policies)


def _constants(
    body: list[BoundSymbol],
    chosen: set[int],
    producers: dict[str, BoundSymbol],
    static: set[str],
    policies: dict[str, str],
) -> set[int]:
    """What recomputed operators read that is made of parameters and constants alone is made again, too."""
    found: set[int] = set()
    waiting = [bsym for bsym in body if id(bsym) in chosen]
    while waiting:
        for argument in waiting.pop().flat_proxy_args:
            source = producers.get(argument.name)
            if source is None or argument.name not in static or id(source) in chosen | found:
                continue
            if policies.get(argument.name) == "save" or communicates(source):
                continue
            found.add(id(source))
            waiting.append(source)
    return found
