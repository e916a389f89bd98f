"""What the code that is being traced changes of its surroundings: written down to be repeated, or refused.

Thunder interprets the model's Python. Assignments to modules reach a compiled entry's epilogue only in part, and
changes of lists, dictionaries and sets happen once, while the entry is compiled. A :class:`Watch` sees each of them
first. What a call can repeat becomes a :class:`Write`; everything else is an error that names the line.
"""

from __future__ import annotations

import array
import collections
import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn
from weakref import WeakSet

import numpy
import torch
from thunder.core import devices, dtypes
from thunder.core.interpreter import PseudoInst, default_lookaside, interpreter_needs_wrap
from thunder.core.jit_ext import _general_jit_lookaside_map, get_jit_ctx
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from thunder_xform.errors import PipelineError, XformError
from thunder_xform.host import unknown
from thunder_xform.host.answers import Answers
from thunder_xform.host.ledger import Ledger
from thunder_xform.host.origins import is_given, real
from thunder_xform.host.outside import Outside
from thunder_xform.host.places import in_models_code, in_users_code, is_spelled, place
from thunder_xform.host.reachable import MEMBERS, OF_TORCH, Reachable
from thunder_xform.host.stamp import MISSING, Stamp, expected, spelled
from thunder_xform.host.surroundings import is_logging, rereadable, unrepeatable, write_log
from thunder_xform.host.untraceable import Judge

_MUTATORS = {
    dict: "__setitem__ __delitem__ __ior__ clear pop popitem setdefault update",
    collections.OrderedDict: "__setitem__ __delitem__ __ior__ clear pop popitem setdefault update move_to_end",
    list: "__setitem__ __delitem__ __iadd__ __imul__ append clear extend insert pop remove reverse sort",
    set: "add clear difference_update discard intersection_update pop remove symmetric_difference_update update "
    "__iand__ __ior__ __isub__ __ixor__",
    collections.deque: "__setitem__ __delitem__ __iadd__ __imul__ append appendleft clear extend extendleft insert pop "
    "popleft remove reverse rotate",
    numpy.ndarray: "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ "
    "__ior__ __ixor__ __ilshift__ __irshift__ __imatmul__ fill partition put resize sort",
    bytearray: "__setitem__ __delitem__ __iadd__ __imul__ append clear extend insert pop remove reverse",
    array.array: "__setitem__ __delitem__ __iadd__ __imul__ append extend insert pop remove reverse",
}
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type, FunctionType, torch.dtype, torch.device)
_ELSEWHERE = "Keep it in a buffer that forward assigns, return it, or change it outside of forward."
#: methods of every module, of which only forward is what models override and users replace
_MODULE_NAMES = frozenset(dir(torch.nn.Module)) - {"forward"} | {"training"}
_TENSOR_STATE = ("data", "grad", "requires_grad")


@dataclass
class Write:
    """One assignment that every call repeats.

    Attributes:
        owner: the object that is assigned to.
        path: dotted name of what is assigned, from the model on.
        name: the attribute.
        is_buffer: whether it is a registered buffer.
        leaves: the value, flattened: proxies and constants.
        spec: how ``leaves`` make up the value.
        place: file and line of the assignment.
    """

    owner: Any
    path: str
    name: str
    is_buffer: bool
    leaves: list[Any]
    spec: Any
    place: str
    proxies: tuple[Proxy, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.proxies = tuple(leaf for leaf in self.leaves if isinstance(leaf, Proxy))


@dataclass(eq=False)
class _Target:
    """Stands for an object's dictionary in Thunder's notes of what is modified, so that it carries values along."""

    watch: Watch
    provenance: Any
    value: dict[str, Any] = field(default_factory=dict)


class Watch:
    """Sees what traced code changes of one model's state.

    Args:
        root: the user's module.
        ledger: the model's.
    """

    def __init__(self, root: torch.nn.Module, ledger: Ledger) -> None:
        #: answers what traced code asks of tensors
        self.answers = Answers()
        #: the compile data that it is installed in
        self.watched: WeakSet[Any] = WeakSet()
        self._root = root
        self._ledger = ledger
        self._unrepeatable = unrepeatable()
        self._tracing: Any = None
        self._judge: Judge | None = None
        self._reachable = Reachable(torch.nn.Module())
        self._setting = 0
        self._writes: dict[Hashable, Write] = {}
        self._reads: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._outside = Outside(self._reachable)

    def lookasides(self) -> dict[Any, Callable[..., Any]]:
        """What Thunder's interpreter is to call in place of functions that change things."""
        checks: dict[Any, Callable[..., None]] = {
            getattr: self._read,
            hasattr: self._read,
            setattr: self._set_attribute,
            delattr: self._delete,
            object.__setattr__: lambda *_: None,
            torch.nn.Parameter: self._make_parameter,
            **dict.fromkeys((*unknown.lookasides(), checkpoint), lambda *_: None),
            **dict.fromkeys((vars, dir), self._read_all),
            **dict.fromkeys(rereadable(), lambda *call: self._outside.reread(*call)),
            type(os.environ).__setitem__: lambda *call: self._refuse("sets a variable of the environment"),
            next: self._advance,
            iter: self._advance,
            type(os.environ).__getitem__: lambda *call: self._outside.environment(*call),
            **dict.fromkeys(self._unrepeatable, self._draw),
        }
        for kind, names in _MUTATORS.items():
            for name in names.split():
                maps = name == "__setitem__" and issubclass(kind, dict)
                checks[getattr(kind, name)] = self._set_item if maps else self._change
        return {fn: self._lookaside(fn, check) for fn, check in checks.items()} | {logging.Logger._log: write_log}

    def install(self, data: Any) -> None:
        """Watch all compilations of Thunder's compile data."""
        self.watched.add(data)
        data.executor_lookasides |= self.answers.lookasides() | self.answers.wrapped_lookasides()
        add_lookasides(data.executor_lookasides, self.lookasides(), lambda lookaside: lookaside)

    def join(self) -> None:
        """Watch the rest of the trace that is under way."""
        table = get_jit_ctx()._executor_lookasides
        table |= {fn: interpreter_needs_wrap(answer) for fn, answer in self.answers.lookasides().items()}
        table |= self.answers.wrapped_lookasides()
        add_lookasides(table, self.lookasides(), interpreter_needs_wrap)

    def refusal(self) -> XformError | None:
        """Why the trace that was just made cannot be compiled, if the model's code caught that; told once."""
        judge, self._judge = self._judge, None
        return judge.refusal if judge else None

    @property
    def writes(self) -> tuple[Write, ...]:
        """The assignments of the trace that was just made."""
        return tuple(self._writes.values())

    def take(self) -> tuple[Write, ...]:
        """:attr:`writes`, and forget the trace."""
        taken = self.writes
        self._writes, self._reads, self._tracing = {}, {}, None
        self._reachable = Reachable(torch.nn.Module())
        self._outside = Outside(self._reachable)
        return taken

    def stamp(self) -> tuple[Stamp, dict[str, str]]:
        """What the trace that was just made read of attributes; and in words, by name."""
        described = {}
        for owner, name, _ in self._reads.values():
            if name in vars(owner):
                subject, value = spelled(self._reachable.labels.get(id(owner), ""), name, vars(owner)[name])
                described[subject] = value
        changed = [self._path(o, n) for o, n, value in self._reads.values() if value != vars(o).get(n, MISSING)]
        changed += [f"a {type(d.get(k)).__name__}" for d, k, value in self._outside.reads if value != d.get(k, MISSING)]
        if changed:
            raise PipelineError(
                f"{type(self._root).__name__} changes {changed[0]} in place while it runs, which compiled code cannot "
                "repeat.",
                _ELSEWHERE,
            )
        return Stamp(self._reads.values(), self._outside, self._root.modules()), described

    # -- what the interpreter calls ----------------------------------------------------------------------------------

    def _lookaside(self, fn: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
        def lookaside(*values: Any, **named: Any) -> Any:
            frame = sys._getframe(1).f_locals  # of Thunder's wrapper, which was given the values with their origins
            args, kwargs = frame["args"], frame["kwargs"]
            self._start()
            if not is_logging():
                check(fn, *args)
            before = lookaside.before  # type: ignore[attr-defined]
            inner = before or _general_jit_lookaside_map.get(fn) or default_lookaside(fn, *args, **kwargs)
            if inner is None:
                return fn(*values, **named)
            self._setting += fn is setattr
            try:
                result = inner(*args, **kwargs)
            finally:
                self._setting -= fn is setattr
            if fn is object.__setattr__ and args[0].value in self._reachable:
                _forget_proxy(args[0])
            if fn is setattr or fn in _DICT_SETITEMS:
                self._note()
            return result

        lookaside.before = None  # type: ignore[attr-defined]
        return lookaside

    def _start(self) -> None:
        tracing = get_jit_ctx()
        if tracing is not self._tracing:
            self.answers.begin()
            self._judge = Judge()
            self._tracing, self._reachable = tracing, Reachable(self._root)
            self._writes, self._reads, self._outside = {}, {}, Outside(self._reachable)
            self._outside.begin()

    def _note(self) -> None:
        """Leave our notes in place of Thunder's own."""
        notes = self._tracing._additional_outputs
        for target in list(notes):
            ours = target.watch is self if isinstance(target, _Target) else id(real(target)) in self._reachable.members
            if ours:
                del notes[target]
        for index, write in enumerate(self._writes.values()):
            owner = SimpleNamespace(inst=PseudoInst.INPUT_FN, proxy=note_of(self, index))
            key = SimpleNamespace(inst=PseudoInst.CONSTANT, value="__dict__")
            target = _Target(self, SimpleNamespace(inst=PseudoInst.LOAD_ATTR, inputs=[owner, key]))
            value = SimpleNamespace(value=write.proxies)
            notes[target].append((PseudoInst.STORE_SUBSCR, target, SimpleNamespace(value=write.name), value))

    def _read(self, fn: Any, owner: Any, name: Any, *default: Any) -> None:
        target, label = owner.value, name.value
        if label == "__dict__" and is_spelled("__dict__"):
            return self._read_all(fn, owner)
        if not hasattr(target, "__dict__") or label.startswith("__"):
            return
        if id(target) not in self._reachable.labels:
            return self._outside.attribute(owner, label)
        if (id(target), label) in self._writes or (id(target), label) in self._reads:
            return
        if isinstance(target, torch.nn.Module):
            if label in OF_TORCH or (label in _MODULE_NAMES and label not in vars(target)):
                return
            if any(label in vars(target)[members] for members in MEMBERS):
                return
        # As it is now: what code that is not traced changes in place later makes the next call trace again.
        self._reads[id(target), label] = target, label, expected(vars(target).get(label, MISSING))

    def _read_all(self, fn: Any, owner: Any = None) -> None:
        if owner is not None and in_models_code():
            self._outside.everything(owner)

    def _set_attribute(self, fn: Any, owner: Any, name: Any, value: Any) -> None:
        target, label = owner.value, name.value
        if isinstance(target, TensorProxy) and label in _TENSOR_STATE:
            self._refuse(f"assigns .{label} of a tensor")
        if isinstance(target, torch.nn.Module) and target in self._reachable:
            if label in target._parameters or issubclass(value.python_typ, torch.nn.Parameter):
                self._refuse(f"assigns the parameter {self._path(target, label)!r}")
            if label in target._modules or isinstance(value.value, torch.nn.Module):
                self._refuse(f"assigns the module {self._path(target, label)!r}")
        elif target in self._reachable and not (hasattr(target, "__dict__") and _is_set_by_python(type(target))):
            self._refuse(f"changes {self._reachable.labels[id(target)]!r}, a {type(target).__name__},")
        elif isinstance(target, type):
            self._refuse(f"assigns {label!r} of the class {target.__name__}")

    def _set_item(self, fn: Any, container: Any, key: Any, value: Any) -> None:
        member = self._reachable.members.get(id(real(container)))
        if member is None:
            return self._change(fn, container, key)
        owner, kind = member
        if not self._setting:
            self._refuse(f"writes {self._path(owner, key.value)!r} past assignment")
        self._record(owner, kind, key.value, value)

    def _change(self, fn: Any, container: Any, *rest: Any) -> None:
        changed = real(container)
        member = self._reachable.members.get(id(changed))
        if member is not None:
            owner, kind = member
            self._refuse(f"changes the attributes of {self._path(owner, kind)!r} past assignment")
        if changed in self._reachable:
            self._refuse(f"changes {self._reachable.labels[id(changed)]!r}, a {type(changed).__name__},")
        if isinstance(changed, dict) and "__builtins__" in changed and rest and not self._setting:
            self._refuse(f"assigns the global {rest[0].value!r}")
        if is_given(container.provenance) and not self._setting:
            self._refuse(f"changes a {type(changed).__name__} that is not its own")

    def _delete(self, fn: Any, owner: Any, name: Any) -> None:
        if owner.value in self._reachable:
            self._refuse(f"deletes {self._path(owner.value, name.value)!r}")

    def _make_parameter(self, fn: Any, *args: Any) -> None:
        self._refuse("makes a parameter")

    def _advance(self, fn: Any, iterator: Any, *rest: Any) -> None:
        if isinstance(iterator.value, Iterator) and is_given(iterator.provenance):
            self._refuse(f"advances a {type(iterator.value).__name__} that is not its own")

    def _draw(self, fn: Any, *args: Any) -> None:
        if in_users_code():
            self._refuse(self._unrepeatable[fn], "Draw with PyTorch's operators, or pass it as an argument.")

    # -- notes -------------------------------------------------------------------------------------------------------

    def _record(self, owner: Any, kind: str, name: str, value: Any) -> None:
        path = self._path(owner, name)
        try:
            leaves, spec = tree_flatten(value.value)
        except TypeError:
            self._refuse(f"assigns {path!r} a {type(value.value).__name__}")
        leaves = [_plain(leaf) for leaf in leaves]
        if kind == "_buffers":
            if name not in owner._buffers or not isinstance(value.value, TensorProxy):
                self._refuse(f"assigns {path!r}, a buffer, something that is no tensor")
            self._check_buffer(path)
        elif kind != "__dict__":
            self._refuse(f"assigns {path!r} in {kind}")
        for leaf in leaves:
            if not isinstance(leaf, (Proxy, *_CONSTANTS)) and leaf not in self._reachable:
                self._refuse(f"assigns {path!r} a {type(leaf).__name__}")
        write = Write(owner, path, name, kind == "_buffers", leaves, spec, place())
        self._writes[id(owner), name] = write

    def _check_buffer(self, path: str) -> None:
        if path not in self._ledger:
            return
        if others := [other for other in self._ledger.aliases(path) if other != path]:
            self._refuse(f"assigns the buffer {path!r}, which is {', '.join(map(repr, others))} as well,")
        version = self._ledger.latest(path)
        if version.layout != "dense":
            self._refuse(f"assigns the buffer {path!r}, which {version.owner!r} stores as {version.layout!r},")

    def _path(self, owner: Any, name: str) -> str:
        label = self._reachable.labels.get(id(owner), "")
        return f"{label}.{name}" if label else str(name)

    def _refuse(self, what: str, remedy: str = _ELSEWHERE) -> NoReturn:
        where = place()
        raise PipelineError(
            f"{type(self._root).__name__} {what} while it runs, which compiled code cannot repeat ({where}).",
            remedy,
            place=where,
        )


_DICT_SETITEMS = (dict.__setitem__, collections.OrderedDict.__setitem__)


def note_of(watch: Watch, index: int) -> str:
    """How Thunder's epilogue spells the owner of one of our writes."""
    return f"thunder_xform_{id(watch)}_{index}"


def add_lookasides(table: dict[Any, Any], lookasides: dict[Any, Any], wrap: Callable[[Any], Any]) -> None:
    for fn, lookaside in lookasides.items():
        lookaside.before = table.get(fn)
        table[fn] = wrap(lookaside)


def _is_set_by_python(kind: type) -> bool:
    """Whether assigning an attribute is Python code or the one way that we see, which changes nothing while traced."""
    setter: Any = kind.__setattr__
    return isinstance(setter, FunctionType) or setter is object.__setattr__


def _forget_proxy(wrapped: Any) -> None:
    """Undo what Thunder does so that its epilogue can assign to an object: ours needs no input for it."""
    if hasattr(wrapped, "anyproxy"):
        del wrapped.anyproxy
        del wrapped.provenance.proxy


def _plain(leaf: Any) -> Any:
    """A constant as the user's code knows it."""
    if isinstance(leaf, dtypes.dtype):
        return dtypes.to_torch_dtype(leaf)
    if isinstance(leaf, devices.Device):
        return devices.to_torch_device(leaf)
    if isinstance(leaf, NumberProxy) and leaf.history is not None:
        return leaf.value
    return leaf
