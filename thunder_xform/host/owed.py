"""Which gradients a backward owes: those of inputs on which an output with a gradient depends.

A compiled backward computes the gradients of all inputs from those of all outputs. What takes no part in the loss
counts as zero there, and gradients of zeros let an optimizer's momentum go on; eager PyTorch leaves ``.grad`` None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import or_
from typing import Any

import torch
from thunder.core import dtypes, prims
from thunder.core.devices import to_torch_device
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_xform.host.operators import operator_of

#: names of parameters of one model without a gradient in the backward under way, on this rank
Unreached = set[str]


def outputs_reached(computation: TraceCtx) -> dict[str, int]:
    """For each tensor of a computation, from which of the outputs a gradient leads to it: bit n for output n."""
    reached: dict[str, int] = {}
    for number, output in enumerate(tree_flatten(computation.bound_symbols[-1].args[0]["output"])[0]):
        if isinstance(output, TensorProxy) and _differentiable(output):
            reached[output.name] = reached.get(output.name, 0) | 1 << number
    for bsym in reversed(computation.bound_symbols[:-1]):
        _follow(bsym, reached)
    return reached


def _follow(bsym: BoundSymbol, reached: dict[str, int]) -> None:
    if bsym.sym.id == prims.PrimIDs.UNPACK_TRIVIAL or bsym.sym.name in ("detach", "stop_gradient"):
        return
    if bsym.sym.name == "checkpoint" and bsym.subsymbols:
        for inner in reversed(bsym.subsymbols):
            _follow(inner, reached)
        return
    outputs = [reached.get(o.name, 0) if _differentiable(o) else 0 for o in bsym.flat_proxy_outs]
    for argument, outputs_of in _pairs(bsym, outputs):
        if outputs_of:
            reached[argument.name] = reached.get(argument.name, 0) | outputs_of


def _pairs(bsym: BoundSymbol, outputs: Sequence[int]) -> Iterable[tuple[Any, int]]:
    arguments = bsym.flat_proxy_args
    operator = operator_of(bsym.sym)
    if operator is not None and operator.one_to_one:
        return zip(arguments[len(arguments) - len(outputs) :], outputs, strict=True)
    every = functools.reduce(or_, outputs, 0)
    return [(argument, every) for argument in arguments]


def needs_gradient(argument: Any) -> bool:
    """Whether an input of a computation requires a gradient."""
    return isinstance(argument, TensorProxy) and argument.requires_grad


def _differentiable(output: Any) -> bool:
    if not isinstance(output, TensorProxy) or ProxyTag.DETACHED_AUTOGRAD_GRAPH in output.tags:
        return False
    return dtypes.is_inexact_dtype(output.dtype)


class Owed:
    """What the backward of one compiled entry owes, depending on which outputs have a gradient.

    Args:
        computation: before differentiation.
        owners: parameters among its inputs, by the name of their proxies: where to say that one is not reached, and
            under which name.
    """

    def __init__(self, computation: TraceCtx, owners: Mapping[str, tuple[Unreached, str]]) -> None:
        self.owners = dict(owners)
        reached = outputs_reached(computation)
        outputs = tree_flatten(computation.bound_symbols[-1].args[0]["output"])[0]
        self._blank = [_zeros(o) if isinstance(o, TensorProxy) else None for o in outputs]
        inputs = [
            (position, a.name, reached.get(a.name, 0))
            for position, a in enumerate(computation.args)
            if needs_gradient(a)
        ]
        every = functools.reduce(or_, (outputs_of for _, _, outputs_of in inputs), 0)
        #: inputs that some output does not depend on: position, name, the outputs that do
        self._optional = [found for found in inputs if found[2] != every]

    @property
    def varies(self) -> bool:
        """Whether there is an input that some output does not depend on."""
        return bool(self._optional)

    def run(self, backward: Callable[[Any, list[Any]], Sequence[Any]], saved: Any, gradients: list[Any]) -> Any:
        """Run the compiled ``backward`` of outputs of which some have no gradient (None)."""
        present = 0
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                present |= 1 << number
            elif (blank := self._blank[number]) is not None:
                gradients[number] = blank()
        missing = [(position, name) for position, name, outputs in self._optional if not outputs & present]
        owned = [(*self.owners[name], position) for position, name in missing if name in self.owners]
        for unreached, name, _ in owned:
            unreached.add(name)
        try:
            results = list(backward(saved, gradients))
            # A plugin has taken out what another rank has a gradient for.
            kept = {position for unreached, name, position in owned if name not in unreached}
        finally:
            for unreached, name, _ in owned:
                unreached.discard(name)
        for position, _ in missing:
            if position not in kept:
                results[position] = None
        return tuple(results)


def _zeros(output: TensorProxy) -> Callable[[], torch.Tensor]:
    shape, dtype, device = tuple(output.shape), dtypes.to_torch_dtype(output.dtype), to_torch_device(output.device)
    return lambda: torch.zeros(shape, dtype=dtype, device=device)
