"""Operators whose gradients Thunder's rules get wrong become calls of PyTorch's functions, with PyTorch's backward.

They are those on complex tensors (Thunder's rules never conjugate, nor take real parts), and losses over classes that
are not averaged (Thunder hands PyTorch's kernel a number of another dtype).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.utils import sequencify

from thunder_xform.errors import TracingError
from thunder_xform.host.computation import Computation
from thunder_xform.host.dataflow import carrying_gradients
from thunder_xform.host.editor import Edit
from thunder_xform.host.operation import Operation
from thunder_xform.host.operators import operator, operator_of, tensor_like
from thunder_xform.host.random import is_random

_PRIMS = {prims.PrimIDs.REAL: torch.real, prims.PrimIDs.IMAG: torch.imag}
_CLASSES = ("cross_entropy", "nll_loss")
#: The tensor among their arguments that has no gradient.
_WEIGHT = 2
#: Take sizes or dimensions one by one, in Thunder and as methods.
_ONE_BY_ONE = ("flip", "permute", "repeat", "reshape", "tile")
#: Has a backward of the user's.
_CUSTOM = "autograd_function_apply"


def with_torch_gradients(computation: Computation) -> Computation:
    """The computation with operators whose gradients are right.

    Raises:
        TracingError: one of which PyTorch has no function.
    """
    trace = computation._trace
    if not any(map(_is_wrong, trace.bound_symbols)):
        return computation
    carrying = carrying_gradients(trace)

    def concerns(operation: Operation) -> bool:
        bsym = operation._bsym
        if not _is_wrong(bsym) or not any(o.name in carrying for o in bsym.flat_proxy_outs):
            return False
        if bsym.sym.name == _CUSTOM or operator_of(bsym.sym) is not None:
            return False
        return prims.OpTags.AUTO_REGISTERED not in (bsym.sym.tags or ())

    def replace(operation: Operation, edit: Edit) -> Any:
        bsym = operation._bsym
        tensors = [a for a in bsym.flat_args if isinstance(a, TensorProxy)]
        wanted = [i for i, t in enumerate(tensors) if dtypes.is_inexact_dtype(t.dtype)]
        if bsym.sym.name in _CLASSES:
            wanted = [i for i in wanted if i < _WEIGHT]
        call = Call(bsym, wanted)
        return call.structured(_run(call, *tensors))

    return computation.rewrite(concerns, replace)


def _is_wrong(bsym: BoundSymbol) -> bool:
    if bsym.sym.name in _CLASSES:
        return _arguments(bsym).get("reduction", "mean") != "mean"
    return any(map(_is_complex, (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)))


def _arguments(bsym: BoundSymbol) -> dict[str, Any]:
    """Of a call, by the names that Thunder's and PyTorch's functions share."""
    return dict(inspect.signature(bsym.sym.meta).bind(*bsym.args, **bsym.kwargs).arguments)


def _is_complex(proxy: Any) -> bool:
    return isinstance(proxy, TensorProxy) and dtypes.is_complex_dtype(proxy.dtype)


class Call:
    """A call of a function of PyTorch, but for the tensors among its arguments.

    Args:
        bsym: what it stands for.
        wanted: which of those tensors need a gradient.
    """

    def __init__(self, bsym: BoundSymbol, wanted: Sequence[int]) -> None:
        self.name = bsym.sym.name
        self.wanted = tuple(wanted)
        self._function = _function(bsym)
        # What is None was not given.
        args, kwargs = list(bsym.args), bsym.kwargs
        if self.name in _CLASSES:
            first, *others = _arguments(bsym).items()
            args, kwargs = [first[1]], dict(others)
        while args and args[-1] is None and self.name != "getitem":
            args.pop()
        leaves, self._spec = tree_flatten((args, {k: v for k, v in kwargs.items() if v is not None}))
        self._leaves = [leaf if isinstance(leaf, TensorProxy) else _of_torch(leaf) for leaf in leaves]
        self.outputs, self._structure = tree_flatten(bsym.output)

    def __repr__(self) -> str:
        return f"<{self.name} with PyTorch's gradient>"

    def structured(self, outputs: Any) -> Any:
        """``outputs`` as the function returns them."""
        return tree_unflatten(list(outputs), self._structure)

    def run(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the function."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorProxy) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return tuple(sequencify(self._function(*args, **kwargs)))

    def backward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of the wanted tensors, given all of them and the gradients of the outputs."""
        count = len(tensors) - len(self.outputs)
        given = [t.detach() for t in tensors[:count]]
        wanted = [given[position].requires_grad_() for position in self.wanted]
        with torch.enable_grad():
            made = self.run(*given)
        pairs = [(o, g) for o, g in zip(made, tensors[count:], strict=True) if o.requires_grad]
        found = torch.autograd.grad([o for o, _ in pairs], wanted, [g.to(o.dtype) for o, g in pairs], allow_unused=True)
        return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True))


def _function(bsym: BoundSymbol) -> Any:
    found: Any = _PRIMS.get(bsym.sym.id)
    if found is None and isinstance(bsym.sym.id, str) and bsym.sym.id.startswith("torch.") and not is_random(bsym):
        found = torch
        path = ["Tensor", bsym.sym.name] if bsym.sym.name in _ONE_BY_ONE else bsym.sym.id.split(".")[1:]
        for part in path:
            found = getattr(found, part, None)
    if found is None or not all(isinstance(o, TensorProxy) for o in bsym.flat_outs):
        raise TracingError(
            f"A gradient flows through {bsym.sym.name!r} of complex tensors, which compiled code cannot differentiate.",
            "Compute it on torch.view_as_real of them, or outside of the compiled model.",
        )
    return found


def _of_torch(leaf: Any) -> Any:
    if isinstance(leaf, dtypes.dtype):
        return dtypes.to_torch_dtype(leaf)
    if isinstance(leaf, devices.Device):
        return devices.to_torch_device(leaf)
    return leaf.value if isinstance(leaf, Proxy) else leaf


_gradients = operator(
    "xform_torch_backward",
    meta=lambda call, *tensors: tuple(tensor_like(tensors[i], requires_grad=False) for i in call.wanted),
    fn=lambda call, *tensors: call.backward(*tensors),
)


def _backward(inputs: tuple[Any, ...], outputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> list[Any]:
    call, *tensors = inputs
    found: list[Any] = [None] * len(inputs)
    for position, gradient in zip(call.wanted, _gradients(call, *tensors, *gradients), strict=True):
        found[1 + position] = gradient
    return found


_run = operator(
    "xform_torch",
    meta=lambda call, *tensors: tuple(tensor_like(o) for o in call.outputs),
    fn=lambda call, *tensors: call.run(*tensors),
    backward=_backward,
)
