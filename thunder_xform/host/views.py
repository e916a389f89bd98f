"""Which outputs of an operator share memory with an argument, and how to make the same view of another tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.transforms.autocast import disable_autocast

from thunder_xform.host.operators import operator, tensor_like

#: Primitives whose output is a view of their first argument.
_VIEW_PRIMS = frozenset(
    getattr(prims.PrimIDs, name)
    for name in ("BROADCAST_IN_DIM", "IMAG", "REAL", "RESHAPE", "SHALLOW_COPY", "SLICE", "SQUEEZE", "TRANSPOSE")
) | {prims.PrimIDs.UNFOLD, prims.PrimIDs.STRIDE_ORDER}
#: Those that stand in a trace by themselves, as PyTorch does them.
_PRIMS: dict[Any, Callable[..., Any]] = {prims.PrimIDs.TRANSPOSE: torch.Tensor.permute}
#: PyTorch copies where Thunder's primitives would not tell.
_COPIES = frozenset({"clone", "repeat", "repeat_interleave", "tile"})
#: Views or copies, as the strides have it.
_MAY_COPY = ("contiguous", "flatten", "ravel", "reshape", "reshape_as", "to")
#: A write through them is hidden from autograd.
_DETACHING = ("detach", "stop_gradient")


def viewed(bsym: BoundSymbol) -> dict[str, Proxy]:
    """The outputs of an operator that share memory with an argument, by name, and that argument."""
    arguments = {a.name: a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)}
    if not arguments or bsym.sym.id is prims.PrimIDs.RETURN or bsym.sym.name in _COPIES:
        return {}
    if prims.OpTags.AUTO_REGISTERED in (bsym.sym.tags or ()):
        if bsym.sym not in ltorch._syms_returning_views or bsym.sym.id == "torch.nn.functional.unfold":
            return {}
        base = bsym.flat_proxy_args[0]
        return {o.name: base for o in bsym.flat_proxy_outs}
    origins = dict(arguments)

    def visit(inner: BoundSymbol) -> None:
        for part in inner.subsymbols:
            visit(part)
        if inner.sym.id in _VIEW_PRIMS and inner.flat_proxy_args and inner.flat_proxy_args[0].name in origins:
            for output in inner.flat_proxy_outs:
                origins.setdefault(output.name, origins[inner.flat_proxy_args[0].name])

    visit(bsym)
    if bsym.sym in ltorch._syms_returning_views and bsym.sym.name != "getitem":
        # Views in PyTorch, whatever Thunder makes them of.
        origins |= {o.name: bsym.flat_proxy_args[0] for o in bsym.flat_proxy_outs if o.name not in origins}
    return {o.name: origins[o.name] for o in bsym.flat_proxy_outs if o.name in origins and o.name not in arguments}


class View:
    """How a view is made of its base: one output of an operator.

    Attributes:
        bsym: the operator that made it.
        base: its argument that is viewed.
        index: which of the operator's outputs it is.
    """

    def __init__(self, bsym: BoundSymbol, base: Proxy, index: int) -> None:
        self.bsym, self.base, self.index = bsym, base, index

    @property
    def certain(self) -> bool:
        """Whether a write through it changes the base, whatever the strides, and autograd follows it."""
        if self.is_whole:
            return True
        symbol = self.bsym.sym
        others = [a for a in self.bsym.flat_proxy_args if a.name != self.base.name]
        output = tree_flatten(self.bsym.output)[0][self.index]
        known = symbol.id in _PRIMS if symbol.is_prim else symbol.name not in (*_MAY_COPY, *_DETACHING)
        return bool(known and not others and output.dtype == self.base.dtype)

    @property
    def is_whole(self) -> bool:
        """Whether the view is the base itself, as for dropout in evaluation."""
        copies = [self.bsym] if self.bsym.sym.is_prim else self.bsym.subsymbols
        return bool(copies) and all(inner.sym.id is prims.PrimIDs.SHALLOW_COPY for inner in copies)

    def of(self, base: Proxy) -> Any:
        """The same view of another tensor of the trace."""

        def swap(value: Any) -> Any:
            return base if isinstance(value, Proxy) and value.name == self.base.name else value

        with disable_autocast():  # it was applied when the call was traced
            output = self.bsym.sym(*tree_map(swap, self.bsym.args), **tree_map(swap, self.bsym.kwargs))
        return tree_flatten(output)[0][self.index]

    def __call__(self, base: torch.Tensor) -> torch.Tensor:
        """The view of a tensor that has the base's shape."""
        if self.is_whole:
            return base
        made = _function(self.bsym.sym)(base, *self.bsym.args[1:], **self.bsym.kwargs)
        view: torch.Tensor = made[self.index] if isinstance(made, (tuple, list)) else made
        return view


def _function(symbol: Symbol) -> Callable[..., Any]:
    """PyTorch's function that does what one of Thunder's view operators does."""
    if symbol.is_prim:
        return _PRIMS[symbol.id]
    if symbol.name == "getitem":
        return torch.Tensor.__getitem__
    method = getattr(torch.Tensor, symbol.name, None)
    if callable(method):
        return method
    function: Callable[..., Any] = getattr(torch, symbol.name)
    return function


def _written(base: torch.Tensor, new: torch.Tensor, view: View | None) -> torch.Tensor:
    out = base.clone()
    (out if view is None else view(out)).copy_(new)
    return out


def _written_gradient(inputs: Any, outputs: Any, gradients: Any) -> Any:
    _, new, view = inputs
    gradient = gradients[0]
    zeros = ltorch.zeros(*new.shape, device=new.device, dtype=new.dtype)
    rest = gradient if view is None else cut(gradient, view, tuple(new.shape))
    return written(gradient, zeros, view), rest, None


#: ``written(base, new, view)``: ``base`` with ``new`` in place of its ``view``, or of all of it if that is None.
written = operator(
    "xform_written",
    meta=lambda base, new, view: tensor_like(base, requires_grad=base.requires_grad or new.requires_grad),
    fn=_written,
    backward=_written_gradient,
)
#: ``cut(base, view, shape)``: the ``view`` of ``base``.
cut = operator(
    "xform_cut",
    meta=lambda base, view, shape: tensor_like(base, shape=shape),
    fn=lambda base, view, shape: view(base),
)
