"""Where shards live, and what cannot be sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist

import thunder_xform as tx
from thunder_xform_fsdp.options import Options


def refuse_source(options: Options, group: dist.ProcessGroup) -> None:
    """Refuse a rank to broadcast from that the group does not have."""
    world, source = dist.get_world_size(group), options.broadcast_from
    if source is not None and not 0 <= source < world:
        raise tx.errors.ParallelError(
            f"Plugin 'fsdp' shall broadcast from rank {source}, but its process group has {world} ranks.",
            f"Set broadcast_from to a rank between 0 and {world - 1}.",
        )


def device_of(params: tx.Parameters, options: Options, group: dist.ProcessGroup) -> torch.device:
    """The device for all shards and buffers: the option's, the model's, or the process group's for a meta model.

    Raises:
        ParallelError: the model is on several devices and the option does not choose.
    """
    if options.device is not None:
        return torch.device(options.device)
    found: dict[torch.device, str] = {}
    for name in params:
        if params.version(name).origin == "model" and not params.tensor(name).is_meta:
            found.setdefault(params.tensor(name).device, name)
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise tx.errors.ParallelError(
            f"Plugin 'fsdp' found {a!r} on {first} and {b!r} on {second}.",
            "Move the model to one device, or set the option device.",
        )
    if found:
        return next(iter(found))
    on_cuda = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
