"""The computation trace before differentiation, as plugins read and rewrite it.

A :class:`Computation` is an immutable view: every edit returns a new one over a new trace, and authors never build
bound symbols by hand. Operators called inside an edit are Thunder's own (:mod:`thunder.torch`) or the project's
(:func:`thunder_xform.operator`), so gradients follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from thunder.core import prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.utils import sequencify

from thunder_xform.errors import PipelineError
from thunder_xform.host.inputs import InputTable
from thunder_xform.host.operators import Operator, operator_of

_UNPACK = prims.PrimIDs.UNPACK_TRIVIAL
_RETURN = prims.PrimIDs.RETURN

#: Position of the weight among the arguments of Thunder's own operators.
_LINEAR_WEIGHT = {"linear": 1}


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
    def linear_weight(self) -> str | None:
        """Name of the parameter that this call applies as the weight of a linear layer, or None.

        So for ``torch.nn.functional.linear`` and for what plugins put in its place. The layer's input, of
        shape (..., in_features), is the first argument; the output has the shape (..., out_features).
        """
        known = self.operator
        index = _LINEAR_WEIGHT.get(self.name) if known is None else known.linear_weight
        return None if index is None else self.parameter(index)

    def parameter(self, index: int) -> str | None:
        """Name of the parameter passed as argument ``index``, or None if that is not one."""
        argument = self.args[index] if index < len(self.args) else None
        return self._table.name_of(argument) if isinstance(argument, TensorProxy) else None

    def call(self, *args: Any) -> Any:
        """Call the same operator again inside an edit; with other positional arguments if given."""
        return self._bsym.sym(*(args or self.args), **self.kwargs)


class Edit:
    """Handed to rewriting functions: access to parameters that the trace may not read yet."""

    __slots__ = ("_table", "_trace")

    def __init__(self, trace: TraceCtx, table: InputTable) -> None:
        self._trace = trace
        self._table = table

    def parameter(self, name: str) -> TensorProxy:
        """The value of a parameter or buffer as the model's operators see it; becomes an input if it is none yet."""
        return self._table.value(name, self._trace)

    def stored(self, name: str) -> TensorProxy:
        """The tensor held for a parameter according to the ledger (a shard, a packed weight), as an input."""
        return self._table.stored(name, self._trace)


Rewrite = Callable[[Operation, Edit], Any]
Restore = Callable[..., Any]


class Computation:
    """Immutable view of the computation trace of one model."""

    def __init__(self, trace: TraceCtx, table: InputTable) -> None:
        self._trace = trace
        self._table = table

    def __str__(self) -> str:
        return str(self._trace)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters and buffers whose stored tensors the trace reads, in order of first use."""
        return tuple(self._table.names_in(self._trace))

    @property
    def differentiable_parameters(self) -> tuple[str, ...]:
        """Names of the trainable parameters from which a path leads to an output, in order of first use."""
        live: set[str] = set()
        for bsym in reversed(self._trace.bound_symbols):
            if bsym.sym.id == _RETURN:
                live |= {p.name for p in tree_flatten(bsym.args[0]["output"])[0] if isinstance(p, Proxy)}
            elif bsym.sym.id != _UNPACK and any(o.name in live for o in bsym.flat_proxy_outs):
                live |= {a.name for a in bsym.flat_proxy_args}
        return tuple(
            name
            for name in self.parameters
            if self._table.inputs[name].name in live and self._table.inputs[name].requires_grad
        )

    def operations(self) -> Iterator[Operation]:
        """All operator calls, in order, without unpacking and return."""
        for bsym in self._trace.bound_symbols:
            if bsym.sym.id not in (_UNPACK, _RETURN):
                yield Operation(bsym, self._table)

    def rewrite(self, which: str | Callable[[Operation], bool], fn: Rewrite) -> Computation:
        """Replace operator calls.

        Args:
            which: operator name as printed in the trace, for example ``"linear"``, or a function that tells
                whether to replace a call.
            fn: called as ``fn(operation, edit)`` for each call; returns what takes the place of its output (proxy or
                tuple of proxies of the same shapes and dtypes), or None to leave the call as it is.

        Raises:
            PipelineError: the replacement has another shape, dtype or number of outputs.
        """

        def visit(bsym: BoundSymbol, editor: _Editor) -> bool:
            if bsym.sym.id == _RETURN:
                return False
            operation = Operation(bsym, editor.table)
            if not (operation.name == which if isinstance(which, str) else which(operation)):
                return False
            result, inserted = editor.run(lambda: fn(operation, editor.edit))
            if result is None:
                return False
            replaced = {proxy.name for proxy in bsym.flat_proxy_outs}
            read = [a for b in inserted for a in b.flat_proxy_args] + list(sequencify(result))
            if any(getattr(proxy, "name", None) in replaced for proxy in read):
                raise PipelineError(
                    f"The replacement of {operation.name!r} reads the output of the call that it replaces.",
                    "Use what `operation.call()` returns; return None to leave a call as it is.",
                )
            editor.emit(inserted)
            what = f"the replacement of {operation.name!r}"
            editor.substitute(bsym.flat_proxy_outs, sequencify(result), what)
            return True

        return self._edited(visit)

    def restore(self, groups: Iterable[tuple[Sequence[str], Restore]], *, recompute: bool = False) -> Computation:
        """Put operators between stored parameters and everything that reads them.

        Whatever read the inputs of ``names`` up to now reads the outputs of ``fn`` instead: a gathered weight for a
        shard, say. Call it for every parameter whose stored form the plugin changed through the ledger.

        Args:
            groups: pairs ``(names, fn)``. Right before the first use of any of ``names``, ``fn(*stored)`` is
                called with the stored tensors in that order and returns as many tensors, of the shapes that the
                inputs had before; None for a name that the trace does not read (scales of a packed weight, say).
            recompute: call ``fn``'s operators again in the backward instead of keeping their outputs for it.

        Raises:
            PipelineError: a group of which the trace reads no name; outputs that do not fit.
        """
        waiting: dict[str, tuple[Sequence[str], Restore]] = {}
        read, inputs = set(self.parameters), self._table.inputs
        for names, fn in groups:
            used = [name for name in names if name in read]
            if not used:
                raise _unread(*names)
            for name in used:
                if inputs[name].name in waiting:
                    raise PipelineError(
                        f"Cannot restore {name!r} twice in one pass.", "Put each name into one group.", name=name
                    )
                waiting[inputs[name].name] = (names, fn)

        def visit(bsym: BoundSymbol, editor: _Editor) -> bool:
            for use in _uses(bsym):
                if use in waiting:
                    names, fn = waiting[use]
                    used = {name: inputs[name] for name in names if name in read}
                    for proxy in used.values():
                        del waiting[proxy.name]
                    editor.restore(names, used, fn, recompute)
            return False

        return self._edited(visit)

    def _edited(self, visit: Callable[[BoundSymbol, _Editor], bool]) -> Computation:
        editor = _Editor(self._trace, self._table.copy())
        return Computation(editor.walk(visit), editor.table)


def _check_count(old: Sequence[Any], new: Sequence[Any], what: str) -> None:
    if len(old) != len(new):
        raise PipelineError(f"{len(new)} tensors stand for {what}, which is {len(old)}.", "Return one for each.")


def _unread(*names: str) -> PipelineError:
    return PipelineError(
        f"Cannot restore {', '.join(map(repr, names))}: the computation does not read it.",
        "Restore only names from `computation.parameters`.",
        name=names[0],
    )


def _uses(bsym: BoundSymbol) -> list[str]:
    """Names of the proxies that an operator, or the return statement as the model wrote it, reads."""
    if bsym.sym.id == _RETURN:
        return [p.name for p in tree_flatten(bsym.args[0]["output"])[0] if isinstance(p, Proxy)]
    return [a.name for a in bsym.flat_proxy_args]


class _Editor:
    """One pass over a trace that inserts operators and redirects later uses of what they replace."""

    def __init__(self, trace: TraceCtx, table: InputTable) -> None:
        self.table = table
        self.trace = from_trace(trace)
        self.edit = Edit(self.trace, table)
        self._source = trace
        self._swaps: dict[Any, Proxy] = {}
        self._emitted: list[BoundSymbol] = []

    def run(self, fn: Callable[[], Any]) -> tuple[Any, list[BoundSymbol]]:
        """Trace ``fn``; returns its result and the operators it called."""
        self.trace.push_scope([])
        try:
            result = fn()
        finally:
            inserted = self.trace.pop_scope()
        return result, inserted

    def emit(self, bsyms: Iterable[BoundSymbol]) -> None:
        self._emitted.extend(bsyms)

    def substitute(self, old: Sequence[Proxy], new: Sequence[Any], what: str, *, same_dtype: bool = True) -> None:
        """Let every later use of ``old`` read ``new``."""
        _check_count(old, new, what)
        for before, after in zip(old, new, strict=True):
            if not isinstance(after, TensorProxy) or not isinstance(before, TensorProxy):
                raise PipelineError(f"{after!r} stands for a tensor in {what}.", "Return tensors of the trace.")
            if tuple(before.shape) != tuple(after.shape) or (same_dtype and before.dtype != after.dtype):
                raise PipelineError(
                    f"A tensor {tuple(after.shape)} {after.dtype} stands for {tuple(before.shape)} {before.dtype} "
                    f"in {what}.",
                    "Return tensors of the shapes and dtypes that the model's operators were traced with.",
                )
            if before is not after:
                self._swaps[variableify(before)] = after

    def restore(self, names: Sequence[str], used: Mapping[str, TensorProxy], fn: Restore, recompute: bool) -> None:
        """Insert ``fn`` on the stored tensors of ``names``; what read the inputs ``used`` reads its outputs."""
        stored = [self.table.stored(name, self.trace) for name in names]
        result, inserted = self.run(lambda: fn(*stored))
        if recompute:
            for bsym in inserted:
                for output in bsym.flat_proxy_outs:
                    output.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
        self.emit(inserted)
        what = f"the restored {', '.join(map(repr, names))}"
        _check_count(names, sequencify(result), what)
        values = {name: value for name, value in zip(names, sequencify(result), strict=True) if value is not None}
        if spare := [name for name in values if name not in used]:
            raise _unread(*spare)
        self.substitute(list(used.values()), [values.get(name) for name in used], what, same_dtype=False)
        for name, before in used.items():
            if self.table.current(name) is before:
                self.table.set_value(name, values[name])

    def walk(self, visit: Callable[[BoundSymbol, _Editor], bool]) -> TraceCtx:
        with tracectx(self.trace):
            for bsym in self._source.bound_symbols:
                if bsym.sym.id == _UNPACK:
                    continue
                if bsym.sym.id == _RETURN:
                    visit(bsym, self)
                    swapped = bsym.from_bsym_swap_proxies(self._swaps, skip_output=True).args[0]
                    taken = {a.name for a in self._source.args}
                    # Arguments stay arguments, whatever stands for them in operators.
                    now = [
                        before if before.name in taken else after
                        for before, after in zip(bsym.args[0]["flat_args"], swapped["flat_args"], strict=True)
                    ]
                    last = bsym.from_bsym(args=({**swapped, "flat_args": now},))
                    continue
                if not visit(bsym.from_bsym_swap_proxies(self._swaps, skip_output=True), self):
                    self._emitted.append(bsym.from_bsym_swap_proxies(self._swaps, skip_output=True))
            return self.table.close(self.trace, self._emitted, last, self._source.args)
