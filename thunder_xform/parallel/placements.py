"""From what plugins say of where parameters lie to DTensors on one mesh."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from thunder_xform.host.ledger import Ledger
from thunder_xform.host.placement import Placed
from thunder_xform.host.version import Version
from thunder_xform.parallel.agreement import gather_objects
from thunder_xform.parallel.sharded import ShardedTensor


def distributed_parameters(ledger: Ledger) -> dict[str, torch.nn.Parameter]:
    """Every parameter as a DTensor that shares the storage of the live one; none if no plugin cuts any.

    All lie on one mesh, whose dimensions are those that plugins declared: first what only replicates, then what cuts,
    in the order of the cuts. A parameter is replicated over those that nobody cut it over. A scalar is one row. A
    collective where the mesh has several dimensions.
    """
    versions = [version for name in ledger if (version := ledger.latest(name)).kind == "parameter"]
    declared = {_key(placed): placed for version in versions for placed in version.placed}
    cut = {_key(placed) for version in versions for placed in version.placed if _cuts(placed)}
    if not cut:
        return {}
    dimensions = [placed for key, placed in declared.items() if key not in cut]
    dimensions += [placed for key, placed in declared.items() if key in cut]
    mesh = _mesh(dimensions, versions[0].device.type)
    return {v.name: _distributed(ledger.tensor(v.name), v, mesh, dimensions) for v in versions if _known(v)}


def _known(version: Version) -> bool:
    """Whether all that was cut is declared."""
    return bool(version.placed) or version.stored_shape == version.whole_shape


def _cuts(placed: Placed) -> bool:
    return isinstance(placed.placement, Shard)


def _key(placed: Placed) -> str:
    return str(placed.group.group_name)


def _distributed(
    stored: torch.Tensor, version: Version, mesh: DeviceMesh, dimensions: Iterable[Placed]
) -> torch.nn.Parameter:
    said: dict[str, Placement] = {_key(placed): placed.placement for placed in version.placed}
    placements = tuple(said.get(_key(placed), Replicate()) for placed in dimensions)
    shape = torch.Size(version.whole_shape or (1,) if any(map(_cuts, version.placed)) else version.whole_shape)
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, stored.dtype))
    made = torch.nn.Parameter(
        ShardedTensor(stored.detach(), spec, requires_grad=False), requires_grad=stored.requires_grad
    )
    # Beneath autograd, where the line above aliased it, an alias counts changes on its own.
    made._local_tensor = stored.detach()  # type: ignore[attr-defined]
    made._stored = stored  # type: ignore[attr-defined]
    return made


def _mesh(dimensions: list[Placed], device_type: str) -> DeviceMesh:
    if len(dimensions) == 1 and isinstance(dimensions[0].mesh, DeviceMesh):
        return dimensions[0].mesh
    groups = [placed.group for placed in dimensions]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type)
    ranks: list[object] | int = dist.get_rank()
    for group in reversed(groups):
        ranks = gather_objects(ranks, group)
    names = tuple(_name(placed) for placed in dimensions)
    return DeviceMesh.from_group(groups, device_type, mesh=torch.tensor(ranks), mesh_dim_names=names)


def _name(placed: Placed) -> str:
    """The user's name for the dimension, else the plugin's."""
    names = placed.mesh.mesh_dim_names if isinstance(placed.mesh, DeviceMesh) else None
    return names[0] if names else placed.plugin
