"""The computation trace before differentiation, as plugins read and rewrite it.

A :class:`Computation` is an immutable view: every edit returns a new one over a new trace, and authors never build
bound symbols by hand. Operators called inside an edit are Thunder's own (:mod:`thunder.torch`) or the project's
(:func:`thunder_xform.operator`), so gradients follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.utils import sequencify

from thunder_xform.errors import PipelineError
from thunder_xform.host.editor import RETURN, UNPACK, Edit, Editor, Restore, unread, uses
from thunder_xform.host.inputs import InputTable
from thunder_xform.host.operation import Operation

Rewrite = Callable[[Operation, Edit], Any]


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
            if bsym.sym.id == RETURN:
                live |= {p.name for p in tree_flatten(bsym.args[0]["output"])[0] if isinstance(p, Proxy)}
            elif bsym.sym.id != UNPACK and any(o.name in live for o in bsym.flat_proxy_outs):
                live |= {a.name for a in bsym.flat_proxy_args}
        return tuple(
            name
            for name in self.parameters
            if self._table.inputs[name].name in live and self._table.inputs[name].requires_grad
        )

    def operations(self) -> Iterator[Operation]:
        """All operator calls, in order, without unpacking and return."""
        table = self._table.copy()
        for bsym in self._trace.bound_symbols:
            if bsym.sym.id not in (UNPACK, RETURN):
                table.follow(bsym)
                yield Operation(bsym, table)

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

        def visit(bsym: BoundSymbol, editor: Editor) -> bool:
            if bsym.sym.id == RETURN:
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
                raise unread(*names)
            for name in used:
                if inputs[name].name in waiting:
                    raise PipelineError(
                        f"Cannot restore {name!r} twice in one pass.", "Put each name into one group.", name=name
                    )
                waiting[inputs[name].name] = (names, fn)

        def visit(bsym: BoundSymbol, editor: Editor) -> bool:
            for use in uses(bsym):
                if use in waiting:
                    names, fn = waiting[use]
                    used = {name: inputs[name] for name in names if name in read}
                    for proxy in used.values():
                        del waiting[proxy.name]
                    editor.restore(names, used, fn, recompute)
            return False

        return self._edited(visit)

    def _edited(self, visit: Callable[[BoundSymbol, Editor], bool]) -> Computation:
        editor = Editor(self._trace, self._table.copy())
        return Computation(editor.walk(visit), editor.table)
