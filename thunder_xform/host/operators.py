"""Operators of the project's own executor: implementation, meta function and gradient rule in one definition.

The executor is never listed among a compilation's executors. Its operators carry their implementation, so they run
whatever executors the user chose, with or without autograd, and a fusing executor cannot claim them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import register_grad
from thunder.core.utils import sequencify
from thunder.extend import OperatorExecutor

_executor = OperatorExecutor("thunder_xform", version="1")

_total = _executor.register_operator(
    "xform_total", meta=lambda gradient: tensor_like(gradient), fn=lambda gradient: gradient.sum()
)

GradientRule = Callable[[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], Sequence[Any]]


class Operator:
    """An operator that can be called while a trace is edited. Made by :func:`operator`."""

    __slots__ = (
        "_symbol",
        "collective",
        "linear_bias",
        "linear_weight",
        "name",
        "one_to_one",
        "random",
        "side_effects",
    )

    def __init__(
        self,
        name: str,
        symbol: Any,
        *,
        collective: bool,
        side_effects: bool,
        random: bool,
        one_to_one: bool,
        linear_weight: int | None,
        linear_bias: int | None,
    ) -> None:
        self.name = name
        self.collective = collective
        self.side_effects = side_effects
        self.random = random
        self.one_to_one = one_to_one
        self.linear_weight = linear_weight
        self.linear_bias = linear_bias
        self._symbol = symbol

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._symbol(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operator {self.name}>"


_operators: dict[str, Operator] = {}


def python_call(name: str, run: Callable[..., Any], *, returns: bool = False) -> Symbol:
    """An operator of a prologue or an epilogue that calls ``run``; kept even where nothing reads it, unless it returns.

    In the code that Thunder generates ``name`` leads to ``run``: two of one name in a trace would be one.
    """
    return Symbol(
        name=name,
        id=name,
        meta=lambda *values: None,
        is_prim=True,
        tags=[] if returns else [prims.OpTags.DONT_DCE],
        executor=_executor,
        _bind_postprocess=lambda bsym: setattr(bsym, "_call_ctx", {name: run}),
    )


def operator(
    name: str,
    *,
    meta: Callable[..., Any],
    fn: Callable[..., Any],
    backward: GradientRule | None = None,
    collective: bool = False,
    side_effects: bool = False,
    random: bool = False,
    one_to_one: bool = False,
    linear_weight: int | None = None,
    linear_bias: int | None = None,
) -> Operator:
    """Define an operator.

    Args:
        name: a valid identifier, unique in the process; it is the name printed in traces. Prefix it with your plugin's.
        meta: called with proxies, returns the output proxies (see :func:`tensor_like`), a single one or a tuple.
        fn: the implementation, called with tensors and whatever plain Python arguments the operator was given.
        backward: ``backward(inputs, outputs, output_gradients) -> input_gradients``, run while the trace is
            differentiated, so it is written in operators. One entry for each input; ``None`` where there is no
            gradient. Without it the operator cannot be differentiated.
        collective: the operator communicates between ranks. Inserting one counts as the effect ``trace.collectives``.
        side_effects: in a gradient rule, keep the operator although nothing reads its outputs. Elsewhere something
            must read them: Thunder drops what leads to no output when it differentiates a trace.
        random: the operator draws random numbers. It never runs again in the backward: its outputs are kept for it.
        one_to_one: each output is made of one input, the last of them in their order, as for the parameters of a
            bucket: the gradient of each depends on that output alone.
        linear_weight: for an operator that stands for ``torch.nn.functional.linear``: the position of the
            argument that holds the weight, however encoded. The first argument is the input. Other plugins find
            such calls through :attr:`Operation.linear_weight`.
        linear_bias: likewise, the position of the argument that is added to the product, or None if none is.

    Raises:
        ValueError: the name is not an identifier or is taken.
    """
    if not name.isidentifier():
        raise ValueError(f"Operator name {name!r} is not a Python identifier. Use letters, digits and underscores.")
    if name in _operators:
        raise ValueError(f"An operator named {name!r} exists already. Prefix the name with your plugin's name.")
    tags = [prims.OpTags.DONT_DCE] if side_effects else None
    symbol = _executor.register_operator(name, meta=meta, fn=fn, tags=tags)
    if backward is not None:
        register_grad(symbol, _gradient_transform(symbol, backward))
    made = _operators[name] = Operator(
        name,
        symbol,
        collective=collective,
        side_effects=side_effects,
        random=random,
        one_to_one=one_to_one,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
    )
    return made


def _gradient_transform(symbol: Any, backward: GradientRule) -> Callable[..., Any]:
    """Thunder's form of a gradient rule: run the operator, then trade output gradients for input gradients."""

    def transform(*args: Any) -> Any:
        result = symbol(*args)
        outputs = tuple(sequencify(result))
        gradients = tuple(_gradient_of(o) if isinstance(o, TensorProxy) else None for o in outputs)
        for argument, gradient in zip(args, backward(args, outputs, gradients), strict=True):
            if gradient is not None and isinstance(argument, TensorProxy):
                prims.put_grad(argument, gradient)
        return result

    return transform


def _gradient_of(output: TensorProxy) -> TensorProxy:
    gradient = prims.get_grad(output)
    # Thunder treats 0-dimensional CPU tensors as numbers: their gradients come in the shape of the other operand.
    return gradient if output.ndim else _total(gradient)


def operator_of(symbol: Any) -> Operator | None:
    """The project operator behind a Thunder symbol, or None for Thunder's own."""
    return _operators.get(symbol.name) if symbol.executor is _executor else None


def tensor_like(
    proxy: TensorProxy, *, shape: Sequence[int] | None = None, dtype: Any = None, requires_grad: bool | None = None
) -> TensorProxy:
    """A new proxy with the metadata of ``proxy``, for meta functions.

    Args:
        proxy: device, dtype, shape and requires_grad are taken from it.
        shape: another shape.
        dtype: another dtype, a ``torch.dtype`` or a Thunder dtype.
        requires_grad: whether gradients flow through the new tensor.
    """
    from thunder.core.dtypes import to_dtype

    return TensorProxy(
        shape=tuple(proxy.shape if shape is None else shape),
        device=proxy.device,
        dtype=proxy.dtype if dtype is None else to_dtype(dtype),
        requires_grad=proxy.requires_grad if requires_grad is None else requires_grad,
    )
