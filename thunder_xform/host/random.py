"""Which operators may run twice: random numbers drawn again in the backward would be others."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from thunder.core import prims
from thunder.core.dtypes import is_inexact_dtype
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_xform.errors import PipelineError
from thunder_xform.host.notes import Notes
from thunder_xform.host.operators import operator_of

_RANDOM = frozenset(
    {
        prims.PrimIDs.UNIFORM,
        prims.PrimIDs.RANDN,
        prims.PrimIDs.RANDINT,
        prims.PrimIDs.MULTINOMIAL,
        prims.PrimIDs.GET_AND_UPDATE_RNG_STATE,
        # Uninitialized memory is no number to compute twice, either.
        prims.PrimIDs.EMPTY,
    }
)

#: Operators of PyTorch that Thunder runs as they are and that draw random numbers.
_RANDOM_IN_TORCH = frozenset(
    {
        *("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
        *("feature_dropout", "native_dropout", "gumbel_softmax", "poisson", "randint_like"),
        *(f"fractional_max_pool{n}d{end}" for n in (2, 3) for end in ("", "_with_indices")),
    }
)


def is_random(bsym: BoundSymbol) -> bool:
    """Whether the operator, or one that it is made of, draws random numbers."""
    if bsym.subsymbols:
        return any(map(is_random, bsym.subsymbols))
    operator = operator_of(bsym.sym)
    tags = bsym.sym.tags or ()
    if prims.OpTags.AUTO_REGISTERED in tags:
        return bsym.sym.name in _RANDOM_IN_TORCH and _is_active(bsym)
    return (operator is not None and operator.random) or prims.OpTags.RANDOM_OP in tags or bsym.sym.id in _RANDOM


def runs_once(bsym: BoundSymbol) -> bool:
    """Whether a second run could give another result or have an effect.

    So for random operators, those with side effects, those that write into a tensor, and those that neither Thunder
    nor this project defines, of which nothing is known.
    """
    if bsym.subsymbols:
        return any(map(runs_once, bsym.subsymbols))
    operator = operator_of(bsym.sym)
    if operator is not None:
        return operator.random or operator.side_effects
    if is_random(bsym) or bsym.sym.id is prims.PrimIDs.COPY_:
        return True
    if prims.OpTags.AUTO_REGISTERED in (bsym.sym.tags or ()):
        return False
    return bsym.sym.executor is not None or (bsym.sym.is_prim and not isinstance(bsym.sym.id, prims.PrimIDs))


def communicates(bsym: BoundSymbol) -> bool:
    """Whether the operator, or one that it is made of, communicates between ranks."""
    operator = operator_of(bsym.sym)
    return (operator is not None and operator.collective) or any(map(communicates, bsym.subsymbols))


def refuse_redrawn(bsyms: Iterable[BoundSymbol], differentiable: Iterable[str], notes: Notes) -> None:
    """Refuse operators whose gradient Thunder computes by running them again, with other random numbers.

    Args:
        bsyms: the operators of a computation.
        differentiable: names of its arguments that need a gradient.

    Raises:
        PipelineError: there is one through which a gradient flows.
    """
    live = set(differentiable)
    for bsym in bsyms:
        if live.isdisjoint(a.name for a in bsym.flat_proxy_args):
            continue
        outputs = [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy) and is_inexact_dtype(o.dtype)]
        live |= {o.name for o in outputs if ProxyTag.DETACHED_AUTOGRAD_GRAPH not in o.tags}
        if live.isdisjoint(o.name for o in outputs):
            continue
        if prims.OpTags.AUTO_REGISTERED in (bsym.sym.tags or ()) and is_random(bsym):
            found = notes.module(bsym)
            where = f" in module {found[0]!r}" if found and found[0] else ""
            raise PipelineError(
                f"{bsym.sym.id}{where} would draw other random numbers in the backward than in the forward, so that "
                "its gradients would be wrong.",
                "Use torch.nn.functional.dropout, or call it where no gradient flows.",
                name=bsym.sym.name,
            )


def _is_active(bsym: BoundSymbol) -> bool:
    """Whether a call of one of PyTorch's random operators draws: dropout does not in evaluation."""
    function = getattr(torch.nn.functional, bsym.sym.name, None)
    try:
        call = inspect.signature(function).bind(*bsym.args, **bsym.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True
    call.apply_defaults()
    return bool(call.arguments.get("training", True)) and call.arguments.get("p") != 0
