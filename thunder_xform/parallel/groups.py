"""Process groups and mesh dimensions as options."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from thunder_xform.errors import ParallelError


def process_group(option: Any, plugin: str) -> dist.ProcessGroup:
    """The process group that an option names.

    Args:
        option: a ``ProcessGroup``, a one-dimensional ``DeviceMesh`` (``mesh["shard"]``), or None for all ranks.
        plugin: whose option it is, for messages.

    Raises:
        ParallelError: no process group is initialized, a mesh has several dimensions, or this rank is not a member.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ParallelError(
            f"Plugin {plugin!r} needs a process group, but torch.distributed is not initialized.",
            "Start with torchrun and call torch.distributed.init_process_group() before thunder.jit.",
        )
    group: Any
    if option is None:
        group = dist.group.WORLD
    elif isinstance(option, dist.device_mesh.DeviceMesh):
        if option.ndim != 1:
            raise ParallelError(
                f"Plugin {plugin!r} got a mesh with the dimensions {option.mesh_dim_names} and sizes {option.shape}.",
                'Pass one dimension of it, for example process_group=mesh["shard"].',
            )
        group = option.get_group()
    elif isinstance(option, dist.ProcessGroup) or option is dist.GroupMember.NON_GROUP_MEMBER:
        group = option
    else:
        raise ParallelError(
            f"Plugin {plugin!r} got {type(option).__name__} as process_group.",
            "Pass a torch.distributed.ProcessGroup or one dimension of a DeviceMesh.",
        )
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ParallelError(
            f"Rank {dist.get_rank()} is not a member of the process group given to plugin {plugin!r}.",
            "Build the model only on ranks of the group, or pass a group that contains this rank.",
        )
    return group
