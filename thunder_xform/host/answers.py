"""What traced code asks of tensors, answered as eager PyTorch would.

Thunder answers with what it knows of its proxies: dtypes and devices of its own classes, which equal none of PyTorch's;
one proxy for each way to a tensor; every tensor contiguous; no intermediate result requires a gradient. Code that
branches on such an answer computes something else than in eager PyTorch. Here the answers are PyTorch's, and what
cannot be told is refused.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes
from thunder.core.interpreter import (
    call_opaque,
    get_interpretercompilectx,
    get_interpreterruntimectx,
    wrap_const,
)
from thunder.core.jit_ext import _general_jit_lookaside_map, get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from thunder_xform.errors import TracingError
from thunder_xform.host import unknown
from thunder_xform.host.dataflow import carried_by
from thunder_xform.host.places import in_users_code, place
from thunder_xform.host.replay import CannotReplay, Replay

#: what is true of every tensor that Thunder traces
_CONSTANTS = {"layout": torch.strided, "is_sparse": False, "is_quantized": False, "is_meta": False}
_LAYOUT = ("is_contiguous", "stride", "storage_offset")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
#: what is no operator that writes its result into a tensor
_OTHERWISE = (
    *("transpose_", "t_", "swapaxes_", "swapdims_", "unsqueeze_", "squeeze_", "as_strided_", "resize_", "resize_as_"),
    *("set_", "apply_", "map_", "map2_", "share_memory_", "requires_grad_", "detach_", "bernoulli_", "random_"),
)
#: whose hooks change nothing: Fabric's says which backward was called where it was not the trainer's
_OBSERVERS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


class Answers:
    """Answers questions of the traces of one model, and knows which of them a compiled entry depends on."""

    def __init__(self) -> None:
        self._tracing: Any = None
        self._replay: Any = None
        self._asked = False

    def lookasides(self) -> dict[Any, Callable[..., Any]]:
        """What Thunder's interpreter is to call in place of what Thunder answers with."""
        return {
            TensorProxy.dtype.fget: lambda tensor: dtypes.to_torch_dtype(tensor.dtype),
            TensorProxy.device.fget: lambda tensor: devices.to_torch_device(tensor.device),
            TensorProxy.shape.fget: lambda tensor: torch.Size(tensor.shape),
            TensorProxy.requires_grad.fget: _requires_grad,
            TensorProxy.grad.fget: _grad,
            TensorProxy.__getattr__: self._attribute,
            **{getattr(torch.Tensor, name): functools.partial(self._of_layout, name) for name in _LAYOUT},
            id: self._id,
            type: _type,
            torch.device: torch.device,
            torch.promote_types: torch.promote_types,
            torch.can_cast: torch.can_cast,
            torch.nn.functional.dropout: _dropout,
        }

    def wrapped_lookasides(self) -> dict[Any, Callable[..., Any]]:
        """The same for functions that are given the interpreter's own values."""
        return {getattr: _getattr, hasattr: _hasattr, checkpoint: _checkpoint, **unknown.lookasides()}

    def begin(self) -> None:
        """Answer ``is``, and see what ``%`` makes text of, in the trace that is under way."""
        tracing = get_jit_ctx()
        if tracing is self._tracing:
            return
        self._tracing, self._asked, self._replay = tracing, False, Replay(tracing.computation_trace)
        compiling = get_interpretercompilectx()
        interpret = compiling._opcode_interpreter

        def interpreted(inst: Any, /, **state: Any) -> Any:
            if inst.opname == "IS_OP":
                self._prepare_is(state["stack"])
            elif inst.opname in ("BINARY_OP", "BINARY_MODULO"):
                left, right = (state["stack"].getitem_wrapped(index).value for index in (-2, -1))
                if isinstance(left, str):
                    unknown.refuse_text_of(right)
            return interpret(inst, **state)

        compiling._opcode_interpreter = interpreted

    def take(self) -> Callable[[Any], Any] | None:
        """What the trace that was just made depends on in its arguments besides metadata; None if nothing.

        That is which tensors are one, and how they lie in memory: a function of a tree of arguments.
        """
        asked, self._asked, self._tracing, self._replay = self._asked, False, None, None
        return _layout if asked else None

    def _prepare_is(self, stack: Any) -> None:
        if not all(isinstance(stack.getitem_wrapped(index).value, TensorProxy) for index in (-1, -2)):
            return
        one, other = (self._eager(stack.pop_wrapped().value, "compares by `is`") for _ in range(2))
        # What is pushed in their place is compared instead.
        stack._stack += [wrap_const(None), wrap_const(None if one is other else ...)]

    def _id(self, value: Any) -> int:
        return id(self._eager(value, "takes the id of") if isinstance(value, TensorProxy) else value)

    def _attribute(self, tensor: TensorProxy, name: str) -> Any:
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name == "is_leaf":
            return not _requires_grad(tensor) or tensor.history is not None
        if name in _LAYOUT:
            return functools.partial(call_opaque, functools.partial(self._of_layout, name, tensor))
        if name in _HOOKS:
            return functools.partial(call_opaque, functools.partial(_hook, name))
        try:
            return TensorProxy.__getattr__(tensor, name)
        except AttributeError as error:
            if _has_out_of_place(tensor, name):
                return functools.partial(call_opaque, functools.partial(_in_place, name.removesuffix("_"), tensor))
            if _has(tensor, name):
                # No AttributeError, of which code takes that tensors have no such attribute.
                raise NotImplementedError(str(error)) from error
            raise

    def _of_layout(self, name: str, tensor: TensorProxy, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._eager(tensor, f"asks for {name}() of"), name)(*args, **kwargs)

    def _eager(self, tensor: TensorProxy, asking: str) -> torch.Tensor:
        self._asked = True
        proxied = get_interpreterruntimectx()._proxied_values
        originals = {id(w.value): w.original_value for w in proxied if isinstance(w.value, TensorProxy)}
        try:
            return self._replay.tensor(tensor, originals)
        except CannotReplay:
            where = place()
            raise TracingError(
                f"The model {asking} an intermediate result, which cannot be told while it is compiled ({where}).",
                "Take the decision outside of forward, or leave it out.",
                place=where,
            ) from None


def _has_out_of_place(tensor: TensorProxy, name: str) -> bool:
    try:
        return name.endswith("_") and name not in _OTHERWISE and bool(TensorProxy.__getattr__(tensor, name[:-1]))
    except AttributeError:
        return False


def _in_place(name: str, tensor: TensorProxy, *args: Any, **kwargs: Any) -> Any:
    """An operator in place that Thunder knows out of place only."""
    result = TensorProxy.__getattr__(tensor, name)(*args, **kwargs)
    if tuple(result.shape) != tuple(tensor.shape):
        raise NotImplementedError(f"Unknown attribute {name}_")
    return ltorch.copy_(tensor, result)


def _dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Any:
    result = ltorch.dropout(input, p, training)
    return ltorch.copy_(input, result) if inplace and result is not input else result


def _hook(name: str, hook: Any = None) -> RemovableHandle:
    if getattr(getattr(hook, "func", hook), "__module__", None) in _OBSERVERS:
        return RemovableHandle(OrderedDict())
    where = place()
    raise TracingError(
        f"The model calls {name} of a tensor, whose backward is compiled and calls no hooks ({where}).",
        "Return the tensor and call it on the output, outside of forward.",
        place=where,
    )


def _requires_grad(tensor: TensorProxy) -> bool:
    if tensor.history is not None or tensor.requires_grad:
        return bool(tensor.requires_grad)
    bsyms = [b for scope in get_jit_ctx().computation_trace.scopes for b in scope]
    inputs = [argument for bsym in bsyms for argument in bsym.flat_proxy_args if argument.history is not None]
    return tensor.name in carried_by(bsyms, inputs)


def _grad(tensor: TensorProxy) -> NoReturn:
    where = place()
    raise TracingError(
        f"The model reads .grad of a tensor, of which compiled code has none ({where}).",
        "Pass the gradient as an argument, or take that step outside of forward.",
        place=where,
    )


def _type(value: Any) -> type:
    if isinstance(value, NumberProxy) and in_users_code():
        return value.python_type
    if not isinstance(value, TensorProxy) or not in_users_code():  # Thunder interprets code of its own as well
        return type(value)
    wrapped = next((w for w in get_interpreterruntimectx()._proxied_values if w.value is value), None)
    return torch.Tensor if wrapped is None else wrapped.python_typ


def _getattr(owner: Any, name: Any, *default: Any) -> Any:
    if name.value == "__class__" and isinstance(owner.value, TensorProxy) and in_users_code():
        return wrap_const(_type(owner.value))
    return _general_jit_lookaside_map[getattr](owner, name, *default)


def _hasattr(owner: Any, name: Any) -> Any:
    if isinstance(owner.value, TensorProxy):
        return wrap_const(_has(owner.value, name.value))
    return _general_jit_lookaside_map[hasattr](owner, name)


def _has(tensor: TensorProxy, name: str) -> bool:
    proxied = get_interpreterruntimectx()._proxied_values
    original = next((w.original_value for w in proxied if w.value is tensor), None)
    return hasattr(torch.Tensor, name) or name in vars(tensor) or hasattr(original, name)


def _checkpoint(function: Any, *args: Any, use_reentrant: Any = None, context_fn: Any = None, **kwargs: Any) -> Any:
    """Both kinds are one: no graph is built twice here, and forward and backward see the same random numbers."""
    for name in ("preserve_rng_state", "determinism_check", "debug", "early_stop"):
        kwargs.pop(name, None)
    names, count = tuple(kwargs), len(args)

    def called(function: Any, *values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    if names:
        args, function = (function, *args, *kwargs.values()), wrap_const(called)
    given = {} if context_fn is None else {"context_fn": context_fn}
    return _general_jit_lookaside_map[checkpoint](function, *args, **given)


def _layout(arguments: Any) -> list[Any]:
    """Which tensors are one, and how each lies in memory."""
    seen: dict[int, int] = {}
    return [
        (seen.setdefault(id(leaf), len(seen)), leaf.stride(), leaf.storage_offset())
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, torch.Tensor)
    ]
