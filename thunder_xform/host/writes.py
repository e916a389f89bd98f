"""The epilogue's part of what a forward assigns: each call of a compiled entry assigns it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

from thunder_xform.errors import PipelineError
from thunder_xform.host.dataflow import carrying_gradients
from thunder_xform.host.mutations import Watch, Write, note_of
from thunder_xform.host.operators import python_call

Assign = Callable[[str, torch.Tensor], None]


def repeat_writes(epilogue: TraceCtx, computation: TraceCtx, watch: Watch, assign_buffer: Assign) -> TraceCtx:
    """An epilogue that makes the assignments that ``watch`` saw in the trace.

    Tensors that carry no gradient in eager PyTorch carry none here either: what one step keeps must not hold on to its
    graph.

    Args:
        epilogue: a fresh one, with the notes of ``watch``.
        computation: what it takes tensors from, before differentiation.
        watch: saw the trace.
        assign_buffer: puts a tensor into the transformed model's buffer of that name.

    Raises:
        PipelineError: a buffer is assigned a tensor that carries a gradient.
    """
    writes = {note_of(watch, index): write for index, write in enumerate(watch.take())}
    if not writes:
        return epilogue
    results = tree_flatten(computation.bound_symbols[-1].args[0]["output"])[0]
    results = [r for r in results if isinstance(r, Proxy)]
    carrying = carrying_gradients(computation) if get_compile_data().is_grad_enabled else set()
    # The epilogue takes what the computation returns last, in its order, under names of its own.
    taken = dict(zip([a.name for a in epilogue.args[len(epilogue.args) - len(results) :]], results, strict=True))
    new = from_trace(epilogue)
    new.names = set(epilogue.names)
    body: list[BoundSymbol] = []
    with tracectx(new):
        for bsym in epilogue.bound_symbols:
            write = writes.pop(bsym.args[0], None) if bsym.sym is prims.pack_attr and _is_note(bsym) else None
            if write is None:
                body.append(bsym)
                continue
            values = bsym.args[2]
            carries = [taken[v.name].name in carrying for v in values if v.name in taken]
            if write.is_buffer and any(carries):
                raise PipelineError(
                    f"The buffer {write.path!r} is assigned a tensor that carries a gradient ({write.place}).",
                    "Assign a detached one, or compute it under torch.no_grad().",
                    name=write.path,
                )
            detach = [v.name in taken and taken[v.name].name not in carrying for v in values]
            body.append(_assignment(write, len(body), detach, assign_buffer).bind(*values, output=None))
    new.bound_symbols = body
    new.scopes = [new.bound_symbols]
    return new


def _is_note(bsym: BoundSymbol) -> bool:
    return isinstance(bsym.args[0], str)


def _assignment(write: Write, number: int, detach: Sequence[bool], assign_buffer: Assign) -> Symbol:
    def run(*values: Any) -> None:
        given = iter(
            [v.detach() if cut and isinstance(v, torch.Tensor) else v for v, cut in zip(values, detach, strict=True)]
        )
        leaves = [next(given) if isinstance(leaf, Proxy) else leaf for leaf in write.leaves]
        value = tree_unflatten(leaves, write.spec)
        if write.is_buffer:
            assign_buffer(write.path, value)
        else:
            write.owner.__dict__[write.name] = value

    name = f"assign_{number}_{''.join(c if c.isalnum() else '_' for c in write.path)}"
    return python_call(name, run)
