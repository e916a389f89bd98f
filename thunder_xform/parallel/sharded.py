"""The DTensor that a distributed parameter is, and its gradient, and what optimizers keep beside it.

An optimizer's step calls few operators on long lists of tensors. DTensor works out the placement of every element's
result one by one, which costs several times what small parameters cost themselves. Operators that treat every element
alone need no such work where all operands lie alike: they run on what is stored on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from thunder_xform.errors import ParallelError
from thunder_xform.parallel.elementwise import ELEMENTWISE, NORMS, SCALING, mutates

_DTENSOR_DISPATCH = DTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]


class ShardedTensor(DTensor):
    """A DTensor whose element by element operators run on the local tensors; everything else is DTensor's.

    Pickled, it is a plain DTensor.
    """

    _stored: torch.nn.Parameter | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: DTensor's does nothing either, slowly."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in ELEMENTWISE:
            unwrapped = _locals(args, kwargs)
            if unwrapped is not None:
                return _run(func, args, *unwrapped)
        elif func is SCALING:
            return _unscale(func, *args)
        elif func in NORMS and len(args) < 3:
            args = _without_gaps(*args)
        result = _DTENSOR_DISPATCH(cls, func, types, args, kwargs or {})
        if mutates(func) and isinstance(args[0], DTensor):
            torch.autograd.graph.increment_version(args[0]._local_tensor)
            return args[0]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor. Another DTensor of the same placement, or this rank's part of one, can be assigned."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        part = value.to_local() if isinstance(value, DTensor) else value
        same = not isinstance(value, DTensor) or (value.device_mesh, value.placements) == (
            self.device_mesh,
            self.placements,
        )
        here = self._local_tensor
        if not same or (part.shape, part.dtype, part.device) != (here.shape, here.dtype, here.device):
            raise ParallelError(
                f"The parameter holds {tuple(here.shape)} of {tuple(self.shape)} on this rank, {here.dtype} on "
                f"{here.device}; the data given is {tuple(part.shape)}, {part.dtype} on {part.device}.",
                "Assign a DTensor of the same mesh and placements, or this rank's part.",
            )
        self._local_tensor = part.detach()
        if self._stored is not None:
            self._stored.data = self._local_tensor


def _locals(args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any], Any] | None:
    """Local operands, and the specification of the result; None if the operands lie on different ranks."""
    found: Any = None

    def same(spec: Any, other: Any) -> bool:
        return spec is other or (
            spec.shape == other.shape and spec.placements == other.placements and spec.mesh == other.mesh
        )

    given = args if not kwargs else (*args, *kwargs.values())
    local: list[Any] = []
    for argument in given:
        if isinstance(argument, DTensor):
            if type(found) is list or (found is not None and not same(found, argument._spec)):
                return None
            found = argument._spec
            local.append(argument._local_tensor)
        elif isinstance(argument, list | tuple) and argument and isinstance(argument[0], torch.Tensor):
            if not isinstance(argument[0], DTensor):
                if any(isinstance(tensor, DTensor) or tensor.dim() for tensor in argument):
                    return None
                local.append(argument)
                continue
            if not all(isinstance(tensor, DTensor) for tensor in argument):
                return None
            specs = [tensor._spec for tensor in argument]
            if found is None:
                found = specs
            elif type(found) is not list or len(found) != len(specs):
                return None
            else:
                for spec, other in zip(specs, found, strict=True):
                    if spec is not other and not same(spec, other):
                        return None
            local.append([tensor._local_tensor for tensor in argument])
        elif isinstance(argument, torch.Tensor) and argument.dim():
            return None
        else:
            local.append(argument)
    for spec in found if type(found) is list else (found,):
        for placement in spec.placements:
            if type(placement) is not Shard and type(placement) is not Replicate:
                return None
    count = len(args)
    return local[:count], dict(zip(kwargs, local[count:], strict=True)) if kwargs else {}, found


def _run(func: Any, args: Any, local: list[Any], named: dict[str, Any], specs: Any) -> Any:
    result = func(*local, **named)
    if mutates(func):
        # Beneath autograd nobody counts the change, which a backward under way would have to refuse.
        torch.autograd.graph.increment_version(local[0])
        return None if result is None else args[0]
    if isinstance(result, list | tuple):
        return [placed_as(tensor, spec) for tensor, spec in zip(result, specs, strict=True)]
    return placed_as(result, specs)


def placed_as(tensor: torch.Tensor, spec: Any) -> ShardedTensor:
    """This rank's part ``tensor`` of a whole that lies as ``spec`` says, in the dtype of the part."""
    if tensor.dtype != spec.tensor_meta.dtype:
        return ShardedTensor(tensor, respec(spec, dtype=tensor.dtype), requires_grad=False)
    return ShardedTensor(tensor, spec, requires_grad=False)


def respec(spec: Any, dtype: torch.dtype) -> Any:
    """The same placement of a tensor with another dtype."""
    meta = spec.tensor_meta
    return type(spec)(spec.mesh, spec.placements, tensor_meta=type(meta)(meta.shape, meta.stride, dtype))


def _without_gaps(tensors: Any, *order: float) -> tuple[Any, ...]:
    """Arguments of a norm. A rank without rows takes part with a zero: of none there is no largest element."""
    if order and order[0] < 0:
        return tensors, *order
    several = isinstance(tensors, list | tuple)
    filled = [
        placed_as(t._local_tensor.new_zeros([max(n, 1) for n in t._local_tensor.shape]), t._spec)
        if isinstance(t, DTensor) and t.numel() and not t._local_tensor.numel()
        else t
        for t in (tensors if several else (tensors,))
    ]
    return filled if several else filled[0], *order


def _unscale(func: Any, gradients: list[Any], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """Gradient scaling: what overflows on one rank overflows on all that hold parts of these gradients."""
    func([g._local_tensor if isinstance(g, DTensor) else g for g in gradients], found, inverse)
    cut = {
        (g.device_mesh, dim)
        for g in gradients
        if isinstance(g, DTensor)
        for dim, placement in enumerate(g.placements)
        if not isinstance(placement, Replicate)
    }
    # In one order on all ranks, whatever their gradients are.
    for mesh, dim in sorted(cut, key=lambda place: place[1]):
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank stores of a tensor: of a DTensor its part, without autograd, else the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add ``gradient``, this rank's part, to ``parameter.grad``."""
    if parameter.grad is not None:
        local(parameter.grad).add_(gradient)
    elif isinstance(parameter, DTensor):
        parameter.grad = ShardedTensor(gradient, parameter._spec, requires_grad=False)
    else:
        parameter.grad = gradient
