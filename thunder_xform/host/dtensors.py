"""Modules that are distributed before ``thunder.jit``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from thunder_xform.errors import PipelineError


def refuse_distributed(module: torch.nn.Module) -> None:
    """Refuse a user's module that is distributed already.

    Raises:
        PipelineError: a parameter or buffer is a DTensor, by name.
    """
    if not dist.is_available():
        return
    from torch.distributed.tensor import DTensor

    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, DTensor):
            raise PipelineError(
                f"{type(module).__name__} holds {name!r} as a DTensor in {tensor.placements}.",
                "Pass the plain module to thunder.jit, before fully_shard or parallelize_module: plugins shard it.",
                name=name,
            )
