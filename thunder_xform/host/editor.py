"""One pass over a computation that inserts operators and redirects later uses of what they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.utils import sequencify

from thunder_xform.errors import PipelineError
from thunder_xform.host.inputs import InputTable

UNPACK = prims.PrimIDs.UNPACK_TRIVIAL
RETURN = prims.PrimIDs.RETURN

Restore = Callable[..., Any]


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


class Editor:
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
        check_count(old, new, what)
        for before, after in zip(old, new, strict=True):
            if type(before) is type(after) and not isinstance(before, TensorProxy):
                self._swaps[variableify(before)] = after
                continue
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
        self.table.notes.inserted(inserted, self.table.plugin)
        for bsym in inserted if recompute else ():
            self.table.notes.ask(bsym, "recompute")
        self.emit(inserted)
        what = f"the restored {', '.join(map(repr, names))}"
        check_count(names, sequencify(result), what)
        values = {name: value for name, value in zip(names, sequencify(result), strict=True) if value is not None}
        if spare := [name for name in values if name not in used]:
            raise unread(*spare)
        self.substitute(list(used.values()), [values.get(name) for name in used], what, same_dtype=False)
        for name, before in used.items():
            if self.table.current(name) is before:
                self.table.set_value(name, values[name])

    def walk(self, visit: Callable[[BoundSymbol, Editor], bool]) -> TraceCtx:
        with tracectx(self.trace):
            for bsym in self._source.bound_symbols:
                if bsym.sym.id == UNPACK:
                    continue
                if bsym.sym.id == RETURN:
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
                self.table.follow(bsym)
                if not visit(bsym.from_bsym_swap_proxies(self._swaps, skip_output=True), self):
                    self._emitted.append(bsym.from_bsym_swap_proxies(self._swaps, skip_output=True))
            return self.table.close(self.trace, self._emitted, last, self._source.args)


def check_count(old: Sequence[Any], new: Sequence[Any], what: str) -> None:
    if len(old) != len(new):
        raise PipelineError(f"{len(new)} tensors stand for {what}, which is {len(old)}.", "Return one for each.")


def unread(*names: str) -> PipelineError:
    return PipelineError(
        f"Cannot restore {', '.join(map(repr, names))}: the computation does not read it.",
        "Restore only names from `computation.parameters`.",
        name=names[0],
    )


def uses(bsym: BoundSymbol) -> list[str]:
    """Names of the proxies that an operator, or the return statement as the model wrote it, reads."""
    if bsym.sym.id == RETURN:
        return [p.name for p in tree_flatten(bsym.args[0]["output"])[0] if isinstance(p, Proxy)]
    return [a.name for a in bsym.flat_proxy_args]
