"""What holds for the backward of every compiled call, attached to the call's node in PyTorch's graph.

Compiled backwards cannot be differentiated: ``create_graph=True`` is an error, not gradients that lack terms. And they
give no gradient where eager PyTorch gives none (:mod:`thunder_xform.host.owed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

from thunder_xform.errors import PipelineError
from thunder_xform.host.operators import python_call
from thunder_xform.host.owed import Owed, Unreached

_NAME = "xform_attend_backward"


def attend_backward(
    epilogue: TraceCtx, computation: TraceCtx, named: Mapping[str, str], unreached: Unreached
) -> TraceCtx:
    """An epilogue that prepares the backward of each call.

    Args:
        epilogue: of the entry; another model's part in it stays.
        computation: before differentiation, as all plugins left it.
        named: names of the model's parameters by those of their proxies.
        unreached: where plugins find the parameters that the backward under way does not reach.
    """
    if not get_compile_data().is_grad_enabled:
        return epilogue
    owners = {proxy: (unreached, name) for proxy, name in named.items()}
    body = []
    for bsym in epilogue.bound_symbols:
        if bsym.sym.id == _NAME:
            owners = bsym._call_ctx[_NAME].args[0].owners | owners
        else:
            body.append(bsym)
    given = {a.name for a in computation.args if isinstance(a, Proxy)}
    results = [p for p in tree_flatten(computation.bound_symbols[-1].args[0]["output"])[0] if isinstance(p, Proxy)]
    # The epilogue takes what the computation returns last, in its order.
    taken = epilogue.args[len(epilogue.args) - len(results) :]
    made = [a for a, r in zip(taken, results, strict=True) if isinstance(r, TensorProxy) and r.name not in given]
    new = from_trace(epilogue)
    new.names = set(epilogue.names)
    with tracectx(new):
        attend = _attending(Owed(computation, owners)).bind(*made, output=None)
    new.bound_symbols = [*body[:-1], attend, body[-1]]
    new.scopes = [new.bound_symbols]
    return new


def _attending(owed: Owed) -> Symbol:
    return python_call(_NAME, partial(_attend, owed))


def _attend(owed: Owed, *results: Any) -> None:
    node = _node(results)
    if node is None:
        return
    node.register_prehook(_refuse_second_derivatives)
    if owed.varies:
        # Without a gradient, an output's is None and not zeros.
        node.set_materialize_grads(False)
        inner = node if hasattr(node, "compiled_backward") else node.next_functions[0][0]
        inner.compiled_backward = partial(owed.run, inner.compiled_backward)


def _node(results: Any) -> Any:
    """The compiled call in PyTorch's graph: one node for all that it made, and the newest."""
    nodes: set[Any] = {r.grad_fn for r in results if isinstance(r, torch.Tensor)}
    found = [n for n in nodes if type(n).__name__ in ("ThunderOutputFunctionBackward", "ThunderFunctionBackward")]
    return max(found, key=lambda node: node._sequence_nr(), default=None)


def _refuse_second_derivatives(gradients: Any) -> None:
    # PyTorch enables gradients in a backward only to record it.
    if torch.is_grad_enabled():
        raise PipelineError(
            "The backward of a compiled model is run with create_graph=True, but it cannot be differentiated again.",
            "Compute the gradient penalty with the plain model, or leave out create_graph.",
        )
