"""Whole tensors in the state of a transformed model, as Accelerate expects of every model."""

from __future__ import annotations

from typing import Any

import torch

import thunder_xform as tx


def keep_whole(model: torch.nn.Module, handle: tx.Handle) -> None:
    """Let ``model.state_dict()`` give whole tensors, a collective where they are sharded, and ``load_state_dict`` take
    them. Names are the transformed model's own."""

    def gather(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, _ in module.named_parameters(remove_duplicate=False):
            state[prefix + name] = handle.whole(name, state[prefix + name])

    def cut(module: torch.nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        for name, _ in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = handle.part(name, state[prefix + name])

    model.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(cut)  # type: ignore[no-untyped-call]
