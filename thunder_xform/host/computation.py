"""The computation trace before differentiation, as plugins read and rewrite it.

A :class:`Computation` is an immutable view: every edit returns a new one over a new trace, and authors never build
bound symbols by hand. Operators called inside an edit are Thunder's own (:mod:`thunder.torch`) or the project's
(:func:`thunder_xform.operator`), so gradients follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import or_
from typing import Any

from thunder.core.proxies import Proxy, ProxyTag
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.utils import sequencify

from thunder_xform.errors import PipelineError
from thunder_xform.host.editor import RETURN, UNPACK, Edit, Editor, Restore, unread, uses
from thunder_xform.host.inputs import InputTable, updated_in_place
from thunder_xform.host.operation import Operation
from thunder_xform.host.owed import needs_gradient, outputs_reached
from thunder_xform.host.random import runs_once

Rewrite = Callable[[Operation, Edit], Any]
Which = str | Callable[[Operation], bool]


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
        """Names of the trainable parameters to which a gradient leads from an output, in order of first use."""
        reached = outputs_reached(self._trace)
        inputs = self._table.inputs
        return tuple(n for n in self.parameters if inputs[n].requires_grad and reached.get(inputs[n].name))

    @property
    def optional_parameters(self) -> tuple[str, ...]:
        """Those of the differentiable parameters that get no gradient if only some outputs take part in the loss."""
        reached = outputs_reached(self._trace)
        every = functools.reduce(or_, (reached.get(a.name, 0) for a in self._trace.args if needs_gradient(a)), 0)
        inputs = self._table.inputs
        return tuple(n for n in self.differentiable_parameters if reached[inputs[n].name] != every)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The proxies that the computation returns, in order."""
        returned = tree_flatten(self._trace.bound_symbols[-1].args[0]["output"])[0]
        return tuple(p for p in returned if isinstance(p, Proxy))

    @property
    def updated(self) -> frozenset[str]:
        """Names of the parameters and buffers that the model updates in place."""
        written = updated_in_place(self._trace)
        return frozenset(name for name, proxy in self._table.inputs.items() if proxy.name in written)

    def operations(self) -> Iterator[Operation]:
        """All operator calls, in order, without unpacking and return."""
        table = self._table.copy()
        for bsym in self._trace.bound_symbols:
            if bsym.sym.id not in (UNPACK, RETURN):
                table.follow(bsym)
                yield Operation(bsym, table)

    def rewrite(self, which: Which, fn: Rewrite) -> Computation:
        """Replace operator calls.

        Args:
            which: operator name as printed in the trace, for example ``"linear"``, for the calls that the model wrote
                (those that a plugin called again as they were included, what plugins added left out), or a function
                that tells whether to replace a call; :attr:`Operation.owner` says whose it is.
            fn: called as ``fn(operation, edit)`` for each call; returns what takes the place of its output (proxy or
                tuple of proxies of the same shapes and dtypes), or None to leave the call as it is.

        Raises:
            PipelineError: the replacement has another shape, dtype or number of outputs.
        """

        def visit(bsym: BoundSymbol, editor: Editor) -> bool:
            if bsym.sym.id == RETURN:
                return False
            operation = Operation(bsym, editor.table)
            if not _selects(which, operation):
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
            self._hand_on(bsym, inserted, editor.table)
            editor.emit(inserted)
            what = f"the replacement of {operation.name!r}"
            editor.substitute(*_paired(bsym, result), what)
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
            recompute: call ``fn``'s operators again in the backward instead of keeping their outputs for it, and so
                whatever is computed from them, other parameters and constants alone; see :meth:`recompute`.

        Raises:
            PipelineError: a group of which the trace reads no name; outputs that do not fit; a buffer that the model
                updates in place.
        """
        waiting: dict[str, tuple[Sequence[str], Restore]] = {}
        read, inputs, updated = set(self.parameters), self._table.inputs, self.updated
        for names, fn in groups:
            used = [name for name in names if name in read]
            if not used:
                raise unread(*names)
            for name in used:
                if name in updated:
                    raise PipelineError(
                        f"Cannot restore {name!r}: the model updates it in place, and the update would go into the "
                        "restored copy.",
                        "Leave out the names in `computation.updated`.",
                        name=name,
                    )
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

    def recompute(self, which: Which) -> Computation:
        """Compute the outputs of calls again in the backward instead of saving them for it.

        The choice holds for whatever later plugins put in place of a call. Random numbers are no exception: they are
        kept, and what is computed from them is computed again, so that forward and backward see the same ones. What
        is computed from recomputed values of parameters, other parameters and constants alone is recomputed as well.

        Args:
            which: as in :meth:`rewrite`.

        Raises:
            PipelineError: a call that must not run twice.
        """
        return self._asked(which, "recompute")

    def save(self, which: Which) -> Computation:
        """Save the outputs of calls for the backward if it reads them; takes back :meth:`recompute`."""
        return self._asked(which, "save")

    def _asked(self, which: Which, policy: str) -> Computation:
        table = self._table.copy()
        for operation in self.operations():
            bsym = operation._bsym
            if not _selects(which, operation) or not bsym.flat_proxy_outs:
                continue
            if policy == "recompute" and runs_once(bsym) and not operation.random:
                raise PipelineError(
                    f"Cannot recompute {operation.name!r} in the backward: it has side effects, or what it does is "
                    "unknown.",
                    "Leave it out.",
                    name=operation.name,
                )
            if table.notes.policy(bsym) != policy:
                table.notes.ask(bsym, policy)
        return Computation(self._trace, table)

    @staticmethod
    def _hand_on(old: BoundSymbol, inserted: Sequence[BoundSymbol], table: InputTable) -> None:
        """What holds for a call holds for what takes its place."""
        table.notes.inserted(inserted, table.plugin)
        table.notes.replaced(old, inserted)
        if any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in o.tags for o in old.flat_proxy_outs):
            for output in (o for bsym in inserted for o in bsym.flat_proxy_outs):
                output.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)

    def _edited(self, visit: Callable[[BoundSymbol, Editor], bool]) -> Computation:
        editor = Editor(self._trace, self._table.copy())
        return Computation(editor.walk(visit), editor.table)


def _paired(old: BoundSymbol, result: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The proxies that a call returned, and what replaces each; sizes and flags that it returned besides stay."""
    before, after = tree_flatten(old.output)[0], tree_flatten(result)[0]
    if len(before) != len(after):
        return old.flat_proxy_outs, sequencify(result)
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if isinstance(a, Proxy)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _selects(which: Which, operation: Operation) -> bool:
    if isinstance(which, str):
        return operation.name == which and operation.owner is None
    return which(operation)
