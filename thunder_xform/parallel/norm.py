"""The norm of gradients of which every rank holds parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from thunder_xform.errors import ParallelError
from thunder_xform.parallel.sharded import local

#: The norm over what this rank stores, given parameters: the positions of those that lie alike.
Here = Callable[[Collection[int]], torch.Tensor]


def whole_norm(parameters: Sequence[torch.nn.Parameter], norm_type: float, here: Here) -> torch.Tensor:
    """The norm over the whole gradients of ``parameters``, those without one included: ranks must agree on them.

    Powers of norms are added up over the dimensions of the mesh over which parameters are cut, for each set of
    dimensions in turn. A collective if there are any.

    Raises:
        ParallelError: norms of that order are no sums of powers.
    """
    if norm_type <= 0:
        raise ParallelError(f"Norms of the order {norm_type} cannot be combined over ranks.", "Use a positive order.")
    largest = norm_type == float("inf")
    alike: dict[tuple[int, ...], list[int]] = {}
    for position, parameter in enumerate(parameters):
        alike.setdefault(_cut_over(parameter), []).append(position)
    total: Any = None
    for dimensions in sorted(alike):
        members = alike[dimensions]
        device = local(parameters[members[0]]).device
        power = here(members).to(device, torch.float64)
        power = power if largest else power**norm_type
        for dimension in dimensions:
            mesh = parameters[members[0]].device_mesh  # type: ignore[attr-defined]
            reduction = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(power, reduction, group=mesh.get_group(dimension))
        if total is not None:
            power = torch.maximum(total, power) if largest else total + power
        total = power
    exact = any(p.dtype == torch.float64 for p in parameters if p.grad is not None)
    return (total if largest else total ** (1 / norm_type)).to(torch.float64 if exact else torch.float32)


def local_norm(parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm over what this rank stores of the gradients."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm([g for g in gradients if g.numel()], norm_type)


def _cut_over(parameter: torch.Tensor) -> tuple[int, ...]:
    """Dimensions of the mesh over which the parameter is cut."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(d for d, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate))
