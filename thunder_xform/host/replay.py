"""What eager PyTorch's tensors would be like at some point of a trace: their layout, and which of them are one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch._subclasses.fake_tensor import FakeTensorMode

_NO_OPERATORS = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.RETURN)


class CannotReplay(Exception):
    """An operator is unknown to PyTorch, or what it makes is not what the trace says."""


class Replay:
    """Runs the operators that a trace has so far on tensors without data.

    Args:
        trace: under way, with the operators as the model calls them.
    """

    def __init__(self, trace: TraceCtx) -> None:
        self._trace = trace
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._originals: Mapping[int, torch.Tensor] = {}
        self._fakes: dict[int, torch.Tensor] = {}
        self._made: dict[str, Any] = {}
        self._done: dict[int, BoundSymbol] = {}

    def tensor(self, proxy: TensorProxy, originals: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What ``proxy`` stands for, without its data; the same object for what is one tensor in eager PyTorch.

        Args:
            originals: the tensors that proxies of inputs stand for, by identity of the proxy.

        Raises:
            CannotReplay: it cannot be told.
        """
        self._originals = originals
        with self._mode, torch.no_grad():
            for bsym in [bsym for scope in self._trace.scopes for bsym in scope]:
                if id(bsym) not in self._done and bsym.sym.id not in _NO_OPERATORS:
                    self._done[id(bsym)] = bsym
                    self._run(bsym)
            found: torch.Tensor = self._value(proxy)
            return found

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, TensorProxy):
            original = self._originals.get(id(leaf))
            if leaf.name in self._made:
                value = self._made[leaf.name]
            elif original is not None:
                if id(original) not in self._fakes:
                    self._fakes[id(original)] = self._mode.from_tensor(original)
                value = self._fakes[id(original)]
            else:
                value = None
            if not isinstance(value, torch.Tensor):
                raise CannotReplay(leaf.name)
            return value
        if isinstance(leaf, NumberProxy):
            return leaf.value
        if isinstance(leaf, dtypes.dtype):
            return dtypes.to_torch_dtype(leaf)
        return devices.to_torch_device(leaf) if isinstance(leaf, devices.Device) else leaf

    def _run(self, bsym: BoundSymbol) -> None:
        try:
            args, kwargs = tree_map(self._value, (bsym.args, dict(bsym.kwargs)))
            if bsym.sym.id == "torch.Tensor.to":  # takes no None in the places where Thunder puts one
                args = [a for a in args if a is not None]
                kwargs = {name: value for name, value in kwargs.items() if value is not None}
            results = tree_flatten(_function(bsym.sym.id)(*args, **kwargs))[0]
        except Exception:
            results = []
        outputs = [o for o in tree_flatten(bsym.output)[0] if isinstance(o, TensorProxy)]
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        given = {a.name for a in bsym.flat_proxy_args}
        for index, output in enumerate(outputs):
            fits = len(tensors) == len(outputs) and tuple(tensors[index].shape) == tuple(output._shape)
            # Thunder may answer with the argument itself where PyTorch makes a tensor: one name for two.
            value = tensors[index] if fits else None
            if output.name in given and value is not self._made.get(output.name, value):
                value = None
            self._made[output.name] = value


@functools.cache
def _function(name: Any) -> Any:
    """PyTorch's function of a dotted name."""
    first, _, rest = str(name).partition(".")
    if first != "torch":
        raise CannotReplay(name)
    return attrgetter(rest)(torch)
