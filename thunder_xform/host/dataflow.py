"""Where gradients flow in a computation, before it is differentiated."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from thunder.core import dtypes, prims
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

_DETACHED = ProxyTag.DETACHED_AUTOGRAD_GRAPH


def carrying_gradients(computation: TraceCtx) -> set[str]:
    """Names of the tensors that require a gradient in eager PyTorch."""
    return carried_by(computation.bound_symbols, computation.args)


def carried_by(bsyms: Iterable[BoundSymbol], inputs: Iterable[Any]) -> set[str]:
    """The same for operators of a trace that may still be under way, and proxies of its inputs."""
    carrying = {a.name for a in inputs if isinstance(a, TensorProxy) and a.requires_grad}

    def visit(bsym: BoundSymbol) -> None:
        if bsym.sym.name in ("detach", "stop_gradient"):
            return
        for inner in bsym.subsymbols:
            visit(inner)
        inside = {o.name for inner in bsym.subsymbols for o in inner.flat_proxy_outs}
        if carrying.isdisjoint(a.name for a in bsym.flat_proxy_args):
            return
        for output in bsym.flat_proxy_outs:
            differentiable = isinstance(output, TensorProxy) and dtypes.is_inexact_dtype(output.dtype)
            if differentiable and _DETACHED not in output.tags and output.name not in inside:
                carrying.add(output.name)

    for bsym in bsyms:
        if bsym.sym.id not in (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.RETURN):
            visit(bsym)
    return carrying


def is_detached(bsym: BoundSymbol) -> bool:
    """Whether the model wrote an operator where it had disabled gradients."""
    inner = (o for part in bsym.subsymbols for o in part.flat_proxy_outs)
    return any(_DETACHED in o.tags for o in (*bsym.flat_proxy_outs, *inner))


def may_be_saved(bsym: BoundSymbol, name: str, carrying: Collection[str]) -> bool:
    """Whether an operator reads the tensor ``name`` to compute what carries a gradient, which may need it again."""
    if bsym.subsymbols:
        return any(may_be_saved(inner, name, carrying) for inner in bsym.subsymbols)
    reads = any(a.name == name for a in bsym.flat_proxy_args)
    return reads and any(o.name in carrying for o in bsym.flat_proxy_outs)
