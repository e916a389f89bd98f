"""Values for tensors on the meta device, one module at a time, without touching the user's module."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch

import thunder_xform as tx


class MetaInit:
    """Gives initial values by name.

    Args:
        module: the user's module.
        device: where values are made.
        empty: whether what a checkpoint contains is zero instead of freshly initialized.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, empty: bool) -> None:
        self._module = module
        self._device = device
        self._empty = empty
        self._latest: tuple[str, torch.nn.Module] | None = None

    def refuse(self, names: Iterable[str]) -> None:
        """Refuse meta tensors that nothing can initialize.

        Raises:
            PipelineError: naming the first one.
        """
        for name in names:
            path, _, leaf = name.rpartition(".")
            try:
                owner = self._module.get_submodule(path)
            except AttributeError:
                raise tx.errors.PipelineError(
                    f"Plugin 'fsdp' found {name!r}, which another plugin added, on the meta device.",
                    "Materialize the model before thunder.jit, or leave that plugin out.",
                    name=name,
                ) from None
            if self._from_checkpoint(owner, leaf) or callable(getattr(owner, "reset_parameters", None)):
                continue
            missing = f"{type(owner).__name__} has no reset_parameters()"
            if self._empty:
                raise tx.errors.PipelineError(
                    f"Plugin 'fsdp' cannot initialize {name!r} on the meta device: checkpoints do not contain it, and "
                    f"{missing}.",
                    "Give it one, or make the buffer persistent.",
                    name=name,
                )
            raise tx.errors.PipelineError(
                f"Plugin 'fsdp' cannot initialize {name!r} on the meta device: {missing}.",
                'Give it one, or set meta_init="empty" and load a checkpoint through the handle.',
                name=name,
            )

    def _from_checkpoint(self, owner: torch.nn.Module, leaf: str) -> bool:
        return self._empty and leaf not in owner._non_persistent_buffers_set

    def __call__(self, name: str) -> torch.Tensor:
        """The initial value of a meta tensor."""
        path, _, leaf = name.rpartition(".")
        owner = self._module.get_submodule(path)
        if self._from_checkpoint(owner, leaf):
            return torch.zeros_like(getattr(owner, leaf), device=self._device, requires_grad=False)
        if self._latest is None or self._latest[0] != path:
            self._latest = None
            self._latest = path, _reset_copy(owner, self._device)
        value: torch.Tensor = getattr(self._latest[1], leaf)
        return value.detach()


def _reset_copy(owner: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    made = _copy(owner, device)
    made.reset_parameters()  # type: ignore[operator]
    return made


def _copy(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A module whose own parameters are uninitialized on ``device``, with children on the meta device.

    Whatever ``reset_parameters`` does to it, or to its children, it does not do to the user's module.
    """
    made = copy.copy(module)
    made._parameters = {
        k: None if p is None else torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
        for k, p in module._parameters.items()
    }
    made._buffers = {
        k: None if b is None else torch.empty_like(b, device=device) if b.is_meta else b.to(device, copy=True)
        for k, b in module._buffers.items()
    }
    meta = torch.device("meta")
    made._modules = {k: None if m is None else _copy(m, meta) for k, m in module._modules.items()}
    return made
