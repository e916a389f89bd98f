"""Where the rest of a stored tensor lies, in the words of ``torch.distributed.tensor``."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from thunder_xform.errors import PipelineError


@dataclass(frozen=True, slots=True)
class Placed:
    """One dimension of the mesh that a tensor lies on.

    Attributes:
        mesh: a process group or a one-dimensional mesh.
        placement: ``Shard(dim)``, cut as ``torch.chunk`` cuts, or ``Replicate()``.
        plugin: who said so.
    """

    mesh: dist.ProcessGroup | DeviceMesh
    placement: Placement
    plugin: str

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.mesh.get_group() if isinstance(self.mesh, DeviceMesh) else self.mesh


def check_part(placed: Placed, name: str, whole: tuple[int, ...], part: tuple[int, ...]) -> None:
    """Refuse a part that is not what ``placed`` leaves to this rank of a tensor with the shape ``whole``.

    Raises:
        PipelineError: it has another shape, or the placement is neither ``Shard`` nor ``Replicate``.
    """
    placement, group = placed.placement, placed.group
    known = type(placement) is Shard and 0 <= placement.dim < max(len(whole), 1)
    if not known and type(placement) is not Replicate:
        raise PipelineError(
            f"Plugin {placed.plugin!r} places {name!r}, of the shape {whole}, as {placement!r}.",
            "Use Shard(dim) with a dimension of the tensor, or Replicate().",
            name=name,
        )
    wanted = list(whole or (1,)) if type(placement) is Shard else list(whole)
    if type(placement) is Shard:
        total, world, rank = wanted[placement.dim], dist.get_world_size(group), dist.get_rank(group)
        rows = -(-total // world)
        wanted[placement.dim] = max(0, min(rows, total - rank * rows))
    if list(part) != wanted:
        raise PipelineError(
            f"Plugin {placed.plugin!r} stores {name!r} as {part} on rank {dist.get_rank(group)} of "
            f"{dist.get_world_size(group)}, but {placement!r} of {whole} leaves {tuple(wanted)} to it.",
            "Cut as torch.chunk does, or declare the placement that fits.",
            name=name,
        )
