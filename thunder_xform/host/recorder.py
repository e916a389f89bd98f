"""What single operators compute, in eager PyTorch and in a compiled model."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from thunder_xform.host.operators import operator, tensor_like

_TORCH, _HERE = (str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))


@dataclass(frozen=True)
class Computed:
    """The result of one operator.

    Attributes:
        name: of the operator.
        value: a copy of its result.
        place: the innermost module and line of the user's code that called it; empty in compiled code.
    """

    name: str
    value: torch.Tensor
    place: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What results of the same operator have in common."""
        return self.name.strip("_"), tuple(self.value.shape)


class Log:
    """Results in the order in which they were computed. Not a list, which Thunder would take apart."""

    def __init__(self) -> None:
        self.entries: list[Computed] = []


def _record(log: Log, name: str, value: torch.Tensor) -> torch.Tensor:
    log.entries.append(Computed(name, value.detach().clone()))
    return value


#: ``record(log, name, value) -> value``, in compiled code.
record = operator("xform_record", meta=lambda log, name, value: tensor_like(value), fn=_record)


class Recorder(TorchFunctionMode):
    """Notes down what the torch functions that run inside compute.

    Args:
        module: whose parts places are named by.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.log: list[Computed] = []
        self._names = {id(part): name for name, part in module.named_modules()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.log.append(Computed(func.__name__, result.detach().clone(), self._place()))
        return result

    def _place(self) -> str:
        module = line = ""
        frame: Any = sys._getframe(2)
        while not (module and line) and not frame.f_code.co_filename.startswith(_HERE):
            found = self._names.get(id(frame.f_locals.get("self")))
            if found and not module:
                module = f" in {found!r}"
            if not line and not frame.f_code.co_filename.startswith(_TORCH):
                line = f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
            frame = frame.f_back
        return module + line


def pairs(eager: list[Computed], compiled: list[Computed]) -> list[tuple[Computed, Computed]]:
    """Results of the same operators on both sides, in order."""
    keys = [computed.key for computed in eager], [computed.key for computed in compiled]
    blocks = SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    return [(eager[b.a + i], compiled[b.b + i]) for b in blocks for i in range(b.size)]
