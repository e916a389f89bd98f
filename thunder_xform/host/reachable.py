"""The objects that a module's state consists of: modules, their dictionaries, and what their attributes hold."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch

_CONTAINERS = (dict, list, set, deque)
#: what has nothing in it that code could change without assigning it anew
_LEAVES = (
    int, float, complex, str, bytes, type(None), type, torch.Tensor, torch.dtype, torch.device, torch.nn.Module,
    ModuleType, FunctionType, BuiltinFunctionType, MethodType,
)  # fmt: skip
#: what holds numbers that change in place
ARRAYS = (numpy.ndarray, bytearray, array.array)
#: what torch itself keeps in every module
OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
MEMBERS = ("_parameters", "_buffers", "_modules")


class Reachable:
    """Everything that is reached from a module through attributes and containers, by identity, while it exists.

    Attributes:
        labels: words for each container and object, as Python spells the way to it.
        members: the dictionaries that hold attributes: whose they are, and the attribute they are found under.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.labels: dict[int, str] = {}
        self.members: dict[int, tuple[Any, str]] = {}
        self._alive: list[Any] = []
        for path, module in root.named_modules():
            self.labels[id(module)] = path
            self._note_members(module)
            for name in MEMBERS:
                self.members[id(vars(module)[name])] = module, name
            for name, value in vars(module).items():
                if name not in OF_TORCH:
                    self._visit(value, f"{path}.{name}" if path else name)

    def __contains__(self, value: object) -> bool:
        return id(value) in self.labels

    def _note_members(self, owner: Any) -> None:
        self._alive.append(owner)
        self.members[id(vars(owner))] = owner, "__dict__"

    def _visit(self, value: Any, label: str) -> None:
        waiting = [(value, label)]
        while waiting:
            value, label = waiting.pop()
            if isinstance(value, _LEAVES) or id(value) in self.labels:
                continue
            if isinstance(value, ARRAYS):
                self.labels[id(value)] = label
                self._alive.append(value)
                continue
            if not isinstance(value, (*_CONTAINERS, tuple)):
                if not hasattr(value, "__dict__") or type(value).__module__.partition(".")[0] in ("torch", "thunder"):
                    continue
                self._note_members(value)
            self.labels[id(value)] = label
            self._alive.append(value)
            waiting += children(value, label)


def children(value: Any, label: str) -> Iterator[tuple[Any, str]]:
    """What a container or object holds, with words for each."""
    if isinstance(value, Mapping):
        yield from ((item, f"{label}[{key!r}]") for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((item, f"{label}[{index}]") for index, item in enumerate(value))
    elif not isinstance(value, set):
        yield from ((item, f"{label}.{name}") for name, item in list(vars(value).items()))
