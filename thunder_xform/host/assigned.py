"""Buffers that a forward assigned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from thunder_xform.host.ledger import Ledger


class AssignedBuffers:
    """Takes what a forward assigns to buffers, and shows it to Thunder's tracer.

    Thunder traces with the user's module, which keeps its own buffers. That is of no consequence until one is assigned
    a tensor of another shape, dtype or device, or one that was None: then compiled entries are outdated, and the next
    trace has to read the new one.

    Args:
        ledger: the model's.
        outdate: drops all compiled entries.
    """

    def __init__(self, root: torch.nn.Module, ledger: Ledger, outdate: Callable[[str], object]) -> None:
        self._root = root
        self._ledger = ledger
        self._outdate = outdate
        #: names of buffers that look unlike the user's
        self.changed: set[str] = set()

    def assign(self, name: str, tensor: torch.Tensor) -> None:
        """Hold ``tensor`` as the transformed model's buffer ``name``."""
        if self._ledger.assign(name, tensor):
            self.changed.add(name)
            self._outdate(f"forward assigned {name!r} a tensor of another kind")

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """The user's module has these buffers inside, in place of its own."""
        own = {}
        try:
            for name in self.changed:
                path, _, leaf = name.rpartition(".")
                buffers = self._root.get_submodule(path)._buffers
                own[name] = buffers, leaf, buffers[leaf]
                buffers[leaf] = self._ledger.tensor(name)
            yield
        finally:
            for buffers, leaf, tensor in own.values():
                buffers[leaf] = tensor
