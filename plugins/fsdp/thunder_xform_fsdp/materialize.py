"""Values for parameters on the meta device, one module at a time, without touching the user's module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch

import thunder_xform as tx


def refuse_uninitializable(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Refuse meta parameters whose module cannot initialize them."""
    for name in names:
        owner = module.get_submodule(name.rpartition(".")[0])
        if not callable(getattr(owner, "reset_parameters", None)):
            raise tx.errors.PipelineError(
                f"Plugin 'fsdp' cannot initialize {name!r} on the meta device: {type(owner).__name__} has no "
                f"reset_parameters().",
                'Give it one, or set meta_init="empty" and load a checkpoint through the handle.',
            )


def initializer(module: torch.nn.Module, device: torch.device) -> Callable[[str], torch.Tensor]:
    """A function that gives the initial value of a meta parameter or buffer by name; it keeps one module at a time."""
    latest: list[tuple[str, torch.nn.Module]] = []

    def value(name: str) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        if not latest or latest[0][0] != path:
            latest[:] = [(path, _reset_copy(module.get_submodule(path), device))]
        made = latest[0][1]
        found = made._parameters.get(leaf)
        return (made._buffers[leaf] if found is None else found).detach()  # type: ignore[union-attr]

    return value


def _reset_copy(owner: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A copy of one module whose own parameters and buffers are real and freshly initialized."""
    made = copy.copy(owner)
    made._parameters = {
        k: None if p is None else torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
        for k, p in owner._parameters.items()
    }
    made._buffers = {
        k: None if b is None else torch.empty_like(b, device=device) if b.is_meta else b.clone()
        for k, b in owner._buffers.items()
    }
    made.reset_parameters()  # type: ignore[operator]
    return made
