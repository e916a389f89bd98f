"""Replicated parameters: buckets whose gradients are averaged over a process group.

``replicate`` passes the parameters of a bucket through. Inserted before the first use of any of them, its gradient
comes after all of theirs, so the all-reduce of the bucket starts as soon as its last gradient is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thunder_xform.host.operators import operator, tensor_like
from thunder_xform.parallel import collectives
from thunder_xform.parallel.accumulation import accumulates
from thunder_xform.parallel.presence import Presence
from thunder_xform.parallel.sharded import local


class ReplicatedBucket:
    """Parameters whose gradients travel in one all-reduce.

    Args:
        names: parameter names.
        tensors: gives the live parameters, in the order of ``names``.
        group: process group to average over.
        strays: gives parameters that this backward does not reach, but whose ``.grad`` may hold what other code paths
            of the model accumulated locally; it is averaged along with the bucket.
        optional: names of those that a backward may not reach.
        optional_strays: gives those of ``strays`` of which ranks may have no gradient.
        unreached: gives the names that the backward under way does not reach on this rank; those that another rank
            reaches are taken out.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Callable[[], list[torch.Tensor]],
        group: dist.ProcessGroup,
        strays: Callable[[], list[torch.Tensor]] = list,
        optional: Collection[str] = (),
        optional_strays: Callable[[], list[torch.Tensor]] = list,
        unreached: Callable[[], set[str]] = set,
    ) -> None:
        self.names = tuple(names)
        self.group = group
        self._tensors = tensors
        self._strays = strays
        self._optional = frozenset(optional)
        self._optional_strays = optional_strays
        self._unreached = unreached
        self._world = dist.get_world_size(group)
        self._pending: dist.Work | None = None
        self._presence: Presence | None = None

    def __repr__(self) -> str:
        return f"<bucket of {', '.join(self.names)}>"

    def start(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start averaging ``gradients`` plus what ``.grad`` accumulated locally; returns the flat buffer in flight."""
        flat = torch.empty(sum(g.numel() for g in gradients), dtype=gradients[0].dtype, device=gradients[0].device)
        parameters = self._tensors()
        pieces = self._pieces(flat, gradients)
        present = dict.fromkeys(self.names, True) | dict.fromkeys(self._unreached(), False)
        accumulated = accumulates(parameters)
        for name, piece, gradient, parameter, adds in zip(
            self.names, pieces, gradients, parameters, accumulated, strict=True
        ):
            torch.div(gradient, self._world, out=piece)
            if parameter.grad is not None and adds:
                # Accumulated without synchronization (or already averaged, then averaging changes nothing); autograd
                # will put what this returns in its place.
                piece.add_(local(parameter.grad), alpha=1.0 / self._world)
                parameter.grad = None
                present[name] = True
        strays = self._strays()
        if strays and any(accumulated):
            reduce_accumulated(strays, self.group, flat.nbytes, self._optional_strays())
        self._presence = Presence({n: present[n] for n in self.names if n in self._optional}, self.group, flat.device)
        self._pending = collectives.all_reduce(flat, self.group)
        self._unreached().difference_update(name for name in self.names if present[name])
        return flat

    def finish(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Wait for the buffer; returns its pieces, shaped as ``like``."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._presence is not None:
            self._unreached().difference_update(self._presence.elsewhere())
            self._presence = None
        return tuple(self._pieces(flat, like))

    @staticmethod
    def _pieces(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pieces = flat.split([t.numel() for t in like])
        return [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]


def reduce_accumulated(
    parameters: Iterable[torch.Tensor],
    group: dist.ProcessGroup,
    max_bytes: int,
    optional: Sequence[torch.Tensor] = (),
) -> None:
    """Average the ``.grad`` of ``parameters`` over ``group``, in place and in pieces of ``max_bytes``. A collective.

    Args:
        parameters: the same on all ranks.
        group: the ranks.
        max_bytes: size of the pieces.
        optional: those that may have a gradient on some ranks only, which counts as zeros on the others.
    """
    if optional:
        here = {index: parameter.grad is not None for index, parameter in enumerate(optional)}
        for index in Presence(here, group, optional[0].device).elsewhere():
            optional[index].grad = torch.zeros_like(optional[index])
    world = dist.get_world_size(group)
    for chunk in collectives.in_chunks([local(p.grad) for p in parameters if p.grad is not None], max_bytes):
        flat = torch.cat([g.reshape(-1) for g in chunk]).div_(world)
        collectives.all_reduce(flat, group).wait()
        for gradient, values in zip(chunk, flat.split([g.numel() for g in chunk]), strict=True):
            gradient.copy_(values.view_as(gradient))


def _same(bucket: ReplicatedBucket, *tensors: Any) -> tuple[Any, ...]:
    return tuple(tensor_like(t) for t in tensors)


reduce_start = operator(
    "xform_all_reduce_start",
    meta=lambda bucket, *gradients: tensor_like(
        gradients[0], shape=(sum(math.prod(g.shape) for g in gradients),), requires_grad=False
    ),
    fn=lambda bucket, *gradients: bucket.start(gradients),
    collective=True,
    side_effects=True,
)

reduce_wait = operator(
    "xform_all_reduce_wait",
    meta=lambda bucket, flat, *parameters: tuple(tensor_like(p, requires_grad=False) for p in parameters),
    fn=lambda bucket, flat, *parameters: bucket.finish(flat, parameters),
    collective=True,
)

#: ``replicate(bucket, *parameters) -> parameters``; the gradient is averaged over the bucket's group.
replicate = operator(
    "xform_replicate",
    meta=_same,
    fn=lambda bucket, *parameters: parameters,
    backward=lambda inputs, outputs, gradients: (
        None,
        *reduce_wait(inputs[0], reduce_start(inputs[0], *gradients), *inputs[1:]),
    ),
    collective=True,
    one_to_one=True,
)
