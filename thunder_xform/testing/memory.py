"""How many bytes of tensors are alive: repeatable, unlike resident memory, so tests can assert differences."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Tracks the storages that operators allocate while it is active, in the forward and in the backward.

    >>> with LiveBytes() as live:
    ...     model(x).sum().backward()
    >>> live.peak, live.now()

    What existed before does not count unless it is passed to :meth:`track`. Sizes are read after every operator, so
    storages that are resized in place (as torch's FSDP2 does) count with the size they have at the time. Memory that
    kernels use within one operator is not seen.

    Attributes:
        peak: largest number of bytes alive after any operator so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._outside: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def now(self) -> int:
        """Bytes alive."""
        found = [ref() for ref in self._live.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of ``tensors``, too, although they existed before."""
        for storage in _storages(list(tensors)):
            self._remember(storage, self._live)
        self.peak = max(self.peak, self.now())

    def restart(self) -> None:
        """Let :attr:`peak` start again from what is alive now."""
        self.peak = self.now()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # A subclass such as DTensor: wait for the operators on what it wraps.
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if id(storage) not in self._live:
                self._remember(storage, self._outside)
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if id(storage) not in self._outside:
                self._remember(storage, self._live)
        self.peak = max(self.peak, self.now())
        return result

    def _remember(self, storage: torch.UntypedStorage, where: dict[int, weakref.ref[torch.UntypedStorage]]) -> None:
        key = id(storage)
        if key not in where:
            # A storage keeps its Python object, and so its id, as long as it lives.
            where[key] = weakref.ref(storage, lambda _: where.pop(key, None))


def _storages(values: Any) -> Iterable[torch.UntypedStorage]:
    for leaf in tree_leaves(values):
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type != "meta":
            yield leaf.untyped_storage()
