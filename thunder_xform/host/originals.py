"""The user's module as thunder.jit found it, compared on every call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import torch

from thunder_xform.errors import PipelineError
from thunder_xform.host.ledger import Ledger
from thunder_xform.host.reachable import MEMBERS

_KINDS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_AGAIN = "Change the plain model before thunder.jit, or transform the changed one with a freshly resolved pipeline."
_VALUES = (
    "Load values into the transformed model (model.load_state_dict, thunder_xform.handle(model).load_state_dict), and "
    "copy the plain model before thunder.jit if it is to live on its own."
)
_version, _requires_grad = attrgetter("_version"), attrgetter("requires_grad")


class Originals:
    """Notices what happens to the user's module that the transformed model could not follow.

    Which parameters, buffers and modules there are was settled by ``thunder.jit``. Where plugins put a tensor of their
    own in place of the user's, a change of the user's has no effect either.

    Args:
        root: the user's module.
        ledger: the model's, once all plugins were applied.
    """

    def __init__(self, root: torch.nn.Module, ledger: Ledger) -> None:
        self._root = root
        self._where = [(path, m, kind) for path, m in root.named_modules() for kind in MEMBERS]
        self._dicts = [vars(module)[kind] for _, module, kind in self._where]
        self._found = [dict(members) for members in self._dicts]
        self._members = self._identities()
        held = [(n, o, ledger.tensor(n)) for n in ledger if (o := ledger.original(n)) is not None]
        replaced = [(n, original, live) for n, original, live in held if live is not original and _is_plain(original)]
        self._names = [name for name, _, _ in replaced]
        self._tensors = [original for _, original, _ in replaced]
        # Running the plain model in training mode updates its buffers, which says nothing about the transformed one.
        self._apart = [o for _, o, live in replaced if isinstance(o, torch.nn.Parameter) and not _share(o, live)]
        self._versions = [*map(_version, self._apart)]
        self._trained = [*map(_requires_grad, self._tensors)]
        self._pointers = [*map(torch.Tensor.data_ptr, self._tensors)]

    def check(self) -> None:
        """Compare.

        Raises:
            PipelineError: a parameter, buffer or module was replaced, added or removed; or a tensor of the user's, in
                whose place the transformed model has another, was given other values or another ``requires_grad``.
        """
        if self._members != self._identities():
            self._explain_members()
        if self._versions != [*map(_version, self._apart)]:
            index = self._first(self._versions, map(_version, self._apart))
            self._refuse_values(self._apart[index])
        if self._trained != [*map(_requires_grad, self._tensors)]:
            name = self._names[self._first(self._trained, map(_requires_grad, self._tensors))]
            raise PipelineError(
                f"requires_grad of the plain model's {name!r} was changed after thunder.jit, but the transformed model "
                f"has a tensor of its own.",
                f"Change it on the transformed model: model.get_parameter({name!r}).requires_grad_(...).",
                name=name,
            )
        if self._pointers != [*map(torch.Tensor.data_ptr, self._tensors)]:
            self._refuse_values(self._tensors[self._first(self._pointers, map(torch.Tensor.data_ptr, self._tensors))])

    def intact(self) -> bool:
        """Whether :meth:`check` has nothing to say."""
        try:
            self.check()
        except PipelineError:
            return False
        return True

    def _identities(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict.values, self._dicts)))]

    def _explain_members(self) -> NoReturn:
        for (path, _, kind), before, now in zip(self._where, self._found, self._dicts, strict=True):
            for name, what in _differences(before, now):
                full = f"{path}.{name}" if path else name
                model = type(self._root).__name__
                raise PipelineError(
                    f"The {_KINDS[kind]} {full!r} of the plain {model} was {what} after thunder.jit.",
                    _AGAIN,
                    name=full,
                )
        raise AssertionError("Members differ, but none does.")

    def _refuse_values(self, tensor: torch.Tensor) -> NoReturn:
        name = next(n for n, t in zip(self._names, self._tensors, strict=True) if t is tensor)
        raise PipelineError(
            f"The plain model's {name!r} was given other values after thunder.jit, but the transformed model computes "
            f"with a tensor of its own.",
            _VALUES,
            name=name,
        )

    @staticmethod
    def _first(before: list[Any], now: Iterator[Any]) -> int:
        return next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys((*before, *now)):
        if name not in now:
            yield name, "removed"
        elif name not in before:
            yield name, "added"
        elif before[name] is not now[name]:
            yield name, "replaced"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a pointer and a version to ask for."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not (
        tensor.is_inference() or tensor.layout is not torch.strided
    )


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _is_plain(b) and a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
