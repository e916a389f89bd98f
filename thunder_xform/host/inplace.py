"""Writes in place become values: what is written is a new value, and whatever reads the tensor later reads it.

Thunder's differentiation saves values by reference, so that a later write in place changes what the backward reads.
Without writes there is nothing to change. A write through a view makes a new value of its base once the base, or
another view of it, is read; a write into an argument or a buffer is carried out at the end of the computation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from thunder.clang import maybe_convert_to_dtype
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.torch import _inplace_to_out_of_place
from thunder.transforms.autocast import disable_autocast

from thunder_xform.errors import PipelineError
from thunder_xform.host.dataflow import carrying_gradients, is_detached, may_be_saved
from thunder_xform.host.inputs import InputTable
from thunder_xform.host.operators import operator, tensor_like
from thunder_xform.host.views import View, viewed, written

_COPY = prims.PrimIDs.COPY_
#: Updates its running statistics in place, outside of autograd.
_UPDATES_STATISTICS = "batch_norm"
#: Write what does not depend on what there was, or not smoothly.
_OVERWRITE = ("copy_", "zero_", "ceil_", "floor_", "eq_", "ne_", "ge_", "gt_", "le_", "lt_", "exponential_")
#: Eager PyTorch takes their result for what there was.
_LOGICAL = ("logical_and_", "logical_not_", "logical_or_", "logical_xor_")
_CHANGE_A_COPY = "Change a copy of it."
_DETACH = "Detach the value, or change a copy."

#: ``kept(a)``: what ``a`` holds now, whatever is written into it later.
kept = operator("xform_kept", meta=lambda a: tensor_like(a), fn=torch.clone, backward=lambda i, o, gradients: gradients)


def without_writes(trace: TraceCtx, table: InputTable) -> TraceCtx:
    """The computation with values in place of writes; the notes of ``table`` learn of what is new.

    Raises:
        PipelineError: a write of which the gradients would not be those of eager PyTorch.
    """
    if not any(True for bsym in trace.bound_symbols for _ in _written_by(bsym)):
        return trace
    return _Rewriting(trace, table).run()


def _written_by(bsym: BoundSymbol) -> Iterator[Proxy]:
    """The tensors that an operator writes into in place, of those that it is given."""
    if bsym.sym.id is _COPY:
        yield bsym.args[1]
    given = {a.name for a in bsym.flat_proxy_args}
    for inner in bsym.subsymbols:
        yield from (target for target in _written_by(inner) if target.name in given)


class _Tensor:
    """What the model's code knows as one tensor, in memory of its own or a view of another one's.

    Attributes:
        value: what it held when its memory had seen ``version`` writes.
        base: the tensor that it is a view of, by ``view``; None if it has memory of its own.
        root: the tensor that has the memory.
        writes: of a root, how often its memory was written to.
        waiting: of a root, the writes that its value lacks: which tensor, what, and by which operator.
    """

    def __init__(self, value: Any, base: _Tensor | None = None, view: View | None = None) -> None:
        self.value, self.base, self.view = value, base, view
        self.root: _Tensor = self if base is None else base.root
        self.writes = 0
        self.version = self.root.writes
        self.waiting: list[tuple[_Tensor, Any, BoundSymbol]] = []

    @property
    def views(self) -> tuple[View, ...]:
        """How it is made of its root."""
        return () if self.base is None or self.view is None else (*self.base.views, self.view)


class _Rewriting:
    def __init__(self, trace: TraceCtx, table: InputTable) -> None:
        self._trace, self._table = trace, table
        self._new = from_trace(trace)
        self._new.names = set(trace.names)
        self._body: list[BoundSymbol] = []
        self._arguments = {a.name: _Tensor(a) for a in trace.args if isinstance(a, TensorProxy)}
        self._tensors = dict(self._arguments)
        self._given = {tensor: tensor.value for tensor in self._arguments.values()}
        self._grad_enabled = bool(get_compile_data().is_grad_enabled)

    def run(self) -> TraceCtx:
        *operators, last = self._trace.bound_symbols
        with tracectx(self._new):
            for bsym in operators:
                if bsym.sym.id is prims.PrimIDs.UPDATE_ALIASES:
                    # Thunder's own bookkeeping of what shares memory: new names for the same tensors.
                    self._tensors |= {n.name: self._tensor(o) for o, n in zip(bsym.args[0], bsym.output, strict=True)}
                elif bsym.sym.id is not prims.PrimIDs.UNPACK_TRIVIAL:
                    self._visit(bsym)
            output = tree_map(lambda value: self._current(value, last), last.args[0]["output"])
            finals = {name: self._read(t, last) for name, t in self._arguments.items() if t.writes}
            updated, output = self._carry_out(finals, output)
        flat_args = [updated.get(a.name, a) for a in self._trace.args]
        last = last.from_bsym(args=({**last.args[0], "output": output, "flat_args": flat_args},))
        return self._table.close(self._new, self._body, last, self._trace.args)

    # -- operators ---------------------------------------------------------------------------------------------------

    def _visit(self, bsym: BoundSymbol) -> None:
        targets = list(_written_by(bsym))
        swaps = {variableify(a): self._current(a, bsym) for a in bsym.flat_proxy_args}
        now = bsym.from_bsym_swap_proxies(swaps, skip_output=True)
        if not targets or bsym.sym.name == _UPDATES_STATISTICS:
            self._body.append(now)
            outputs = [o.name if isinstance(o, Proxy) else None for o in tree_flatten(bsym.output)[0]]
            for name, base in viewed(bsym).items():
                index = outputs.index(name)
                output = tree_flatten(bsym.output)[0][index]
                self._tensors[name] = _Tensor(output, self._tensor(base), View(bsym, base, index))
        elif len(targets) == 1 and _is_write(bsym):
            self._write(bsym, now, self._tensor(targets[0]))
        else:
            self._refuse(bsym, "changes what it is given in place", "Write it without changes in place.")

    def _write(self, bsym: BoundSymbol, now: BoundSymbol, target: _Tensor) -> None:
        root = target.root
        before = self._read(target, bsym)
        new = self._run(lambda: self._result(now, None if root in self._given else before), bsym)
        if self._grad_enabled:
            self._check(bsym, root, before, new)
        root.writes += 1
        target.value, target.version = new, root.writes
        if target is root:
            root.waiting = []
        else:
            root.waiting = [w for w in root.waiting if w[0] is not target or w is not root.waiting[-1]]
            root.waiting.append((target, new, bsym))
        self._tensors |= {o.name: target for o in bsym.flat_proxy_outs}

    def _result(self, now: BoundSymbol, before: Proxy | None) -> Any:
        """What an operator would write; ``before`` is what there was, if a gradient may flow to it."""
        out_of_place, flag = _inplace_to_out_of_place.get(now.sym, (None, -1))
        if flag >= 0:
            args = [value for position, value in enumerate(now.args) if position != flag]
            return maybe_convert_to_dtype(out_of_place(*args, **{**now.kwargs, "inplace": False}), now.args[0].dtype)
        *inner, copy = now.subsymbols or [now]
        self._new.peek_scope().extend(inner)
        found = copy.args[0]
        if all(found.name != o.name for made in inner for o in made.flat_proxy_outs):
            found = kept(found)
        # What is overwritten gets a gradient of zeros, as in eager PyTorch, and none is lost.
        return found if before is None or now.sym.name not in _OVERWRITE else written(before, found, None)

    def _check(self, bsym: BoundSymbol, root: _Tensor, before: Proxy, new: Proxy) -> None:
        """Refuse a write whose gradients compiled code would get wrong."""
        if bsym.sym.name in _LOGICAL and before.name in self._carrying():
            self._refuse(bsym, "changes in place what carries a gradient", "Call it out of place.")
        given = self._given.get(root)
        if given is None and not is_detached(bsym):
            return
        carrying = self._carrying()
        if given is not None and given.requires_grad:
            self._refuse(bsym, f"changes {self._named(given)} in place, which requires a gradient", _CHANGE_A_COPY)
        if given is not None and new.name in carrying:
            subject = self._named(given)
            self._refuse(bsym, f"changes {subject} in place by a value that carries a gradient", _DETACH)
        if is_detached(bsym) and before.name in carrying:
            what = "changes a tensor in place, without gradients, through which a gradient flows"
            self._refuse(bsym, what, "Change it with gradients enabled, or change a detached copy.")

    def _run(self, fn: Callable[[], Any], bsym: BoundSymbol) -> Any:
        """Call operators in place of ``bsym``, or because of it."""
        self._new.push_scope([])
        try:
            with disable_autocast():  # it was applied when the call was traced
                result = fn()
        finally:
            inserted = self._new.pop_scope()
        self._body += inserted
        self._table.notes.replaced(bsym, inserted)
        for output in (o for made in inserted for o in made.flat_proxy_outs):
            output.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)  # the notes know
            if is_detached(bsym):
                output.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        return result

    # -- values ------------------------------------------------------------------------------------------------------

    def _tensor(self, proxy: Proxy) -> _Tensor:
        return self._tensors.setdefault(proxy.name, _Tensor(proxy))

    def _current(self, value: Any, reader: BoundSymbol) -> Any:
        return self._read(self._tensor(value), reader) if isinstance(value, TensorProxy) else value

    def _read(self, tensor: _Tensor, reader: BoundSymbol) -> Any:
        """The value of a tensor after all writes to its memory."""
        root = tensor.root
        if tensor.version != root.writes:
            for waiting in root.waiting:
                root.value = self._run(partial(self._put, root.value, *waiting), waiting[-1])
            root.waiting.clear()
            root.version = tensor.version = root.writes
            if tensor is not root:
                tensor.value = self._run(lambda: self._follow(root.value, tensor.views, reader)[-1], reader)
        return tensor.value

    def _put(self, value: Any, target: _Tensor, new: Any, write: BoundSymbol) -> Any:
        """``value``, of the root of ``target``, with ``new`` in place of ``target``."""
        bases = self._follow(value, target.views, write)
        for base, view in reversed(list(zip(bases, target.views, strict=False))):
            new = written(base, new, view)
        return new

    def _follow(self, value: Any, views: tuple[View, ...], bsym: BoundSymbol) -> list[Any]:
        """``value``, its first view, the second view of that, and so on."""
        values = [value]
        for view in views:
            if not view.certain:
                raise PipelineError(
                    f"A tensor is changed in place and read under another name ({view.bsym.sym.name!r} made one of the "
                    f"other), of which compiled code cannot tell whether they share memory{self._where(bsym)}.",
                    "Change a copy, or read what was changed.",
                    name=view.bsym.sym.name,
                )
            values.append(view.of(values[-1]))
        return values

    # -- arguments ---------------------------------------------------------------------------------------------------

    def _carry_out(self, finals: Mapping[str, Any], output: Any) -> tuple[dict[str, Any], Any]:
        """Write the last values of arguments into them; what read them before, and needs them still, reads a copy."""
        carrying = self._carrying()
        returned = {leaf.name for leaf in tree_flatten(output)[0] if isinstance(leaf, Proxy)}
        updated: dict[str, Any] = {}
        for name, final in finals.items():
            argument = self._given[self._arguments[name]]
            if name in returned or any(may_be_saved(bsym, name, carrying) or _views(bsym, name) for bsym in self._body):
                self._new.push_scope([])
                swaps = {variableify(argument): kept(argument)}
                made = self._new.pop_scope()
                body = [bsym.from_bsym_swap_proxies(swaps, skip_output=True) for bsym in self._body]
                self._body = [*made, *body]
                output = tree_map(lambda leaf, s=swaps: _swapped(leaf, s), output)
                final = _swapped(final, swaps)
            self._new.push_scope([])
            updated[name] = prims.copy_(final, argument, grad_enabled=self._grad_enabled)
            self._body += self._new.pop_scope()
            # What the model returns of an argument is that argument.
            output = tree_map(lambda leaf, f=final, u=updated[name]: u if leaf is f else leaf, output)
        return updated, output

    def _carrying(self) -> set[str]:
        seen = from_trace(self._new)
        seen.bound_symbols = self._body
        return carrying_gradients(seen)

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _named(self, argument: TensorProxy) -> str:
        name = self._table.name_of(argument)
        return f"the input {argument.name!r}" if name is None else f"the {self._table.version(name).kind} {name!r}"

    def _where(self, bsym: BoundSymbol) -> str:
        found = self._table.notes.module(bsym)
        return f" in module {found[0]!r}" if found and found[0] else ""

    def _refuse(self, bsym: BoundSymbol, what: str, remedy: str) -> NoReturn:
        # Thunder numbers what it makes of each torch.autograd.Function.
        name = re.sub(r"(_\d+)+$", "", bsym.sym.name)
        raise PipelineError(f"{name!r}{self._where(bsym)} {what}.", remedy, name=name)


def _is_write(bsym: BoundSymbol) -> bool:
    """Whether writing its result is the last that an operator does."""
    return bsym.sym.id is _COPY or bool(bsym.subsymbols and bsym.subsymbols[-1].sym.id is _COPY)


def _views(bsym: BoundSymbol, name: str) -> bool:
    return any(base.name == name for base in viewed(bsym).values())


def _swapped(leaf: Any, swaps: Mapping[Any, Proxy]) -> Any:
    return swaps.get(variableify(leaf), leaf) if isinstance(leaf, Proxy) else leaf
