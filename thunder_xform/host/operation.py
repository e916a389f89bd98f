"""One operator call of a trace, as plugins see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.transforms.autocast import disable_autocast

from thunder_xform.host.inputs import InputTable
from thunder_xform.host.operators import Operator, operator_of
from thunder_xform.host.random import is_random

#: Positions of weight and bias among the arguments of Thunder's own operators.
_LINEAR = {"linear": (1, 2)}


class Operation:
    """One operator call in the trace.

    Attributes:
        name: the operator's name, for example ``"linear"``.
        args: its arguments, proxies where they are tensors; normalized to the operator's positional signature.
        kwargs: keyword-only arguments.
    """

    __slots__ = ("_bsym", "_table", "args", "kwargs", "name")

    def __init__(self, bsym: BoundSymbol, table: InputTable) -> None:
        self._bsym = bsym
        self._table = table
        self.name: str = bsym.sym.name
        self.args: tuple[Any, ...] = bsym.args
        self.kwargs: Mapping[str, Any] = bsym.kwargs

    @property
    def output(self) -> Any:
        """The proxy, or tuple of proxies, that the call produces."""
        return self._bsym.output

    @property
    def operator(self) -> Operator | None:
        """The project operator called here, or None for one of Thunder's."""
        return operator_of(self._bsym.sym)

    @property
    def owner(self) -> str | None:
        """The plugin that put the call there; None for the model, also where a plugin called its operator again."""
        return self._table.notes.owner(self._bsym) or None

    @property
    def module(self) -> str | None:
        """Dotted path of the module whose forward wrote the call, "" for the model itself.

        What a plugin puts in place of a call belongs to the same module. None for what plugins put between parameters
        and their uses, and in a jitted function that calls the plain model.
        """
        found = self._table.notes.module(self._bsym)
        return None if found is None else found[0]

    @property
    def module_call(self) -> int | None:
        """Which call of :attr:`module` wrote it, from 0; above 0 where the forward calls a module more than once."""
        found = self._table.notes.module(self._bsym)
        return None if found is None else found[1]

    @property
    def random(self) -> bool:
        """Whether the call draws random numbers: a second call gives others."""
        return is_random(self._bsym)

    @property
    def policy(self) -> str | None:
        """``"save"`` or ``"recompute"`` if someone asked for one, see :meth:`Computation.recompute`; else None."""
        return self._table.notes.policy(self._bsym)

    @property
    def linear_weight(self) -> str | None:
        """Name of the parameter that this call applies as the weight of a linear layer, or None.

        So for ``torch.nn.functional.linear`` and for what plugins put in its place. The layer's input, of
        shape (..., in_features), is the first argument; the output has the shape (..., out_features).
        """
        index, _ = self._linear
        return None if index is None else self.parameter(index)

    @property
    def linear_bias(self) -> TensorProxy | None:
        """What this call, one with a :attr:`linear_weight`, adds to the product of input and weight, or None."""
        _, index = self._linear
        bias: TensorProxy | None = None if index is None else self.args[index]
        return bias

    @property
    def _linear(self) -> tuple[int | None, int | None]:
        known = self.operator
        return _LINEAR.get(self.name, (None, None)) if known is None else (known.linear_weight, known.linear_bias)

    def parameter(self, index: int) -> str | None:
        """Name of the parameter passed as argument ``index``, cast or as it is, or None if that is not one."""
        argument = self.args[index] if index < len(self.args) else None
        return self._table.name_of(argument) if isinstance(argument, TensorProxy) else None

    def call(self, *args: Any) -> Any:
        """Call the same operator again inside an edit; with other positional arguments if given.

        Without, the call stays what it was: the model's or another plugin's, and nothing that was inserted.
        """
        if args:
            return self._bsym.sym(*args, **self.kwargs)
        with disable_autocast():  # it was applied when the call was traced
            output = self._bsym.sym(*self.args, **self.kwargs)
        self._table.notes.called_again(self._bsym, output)
        return output
