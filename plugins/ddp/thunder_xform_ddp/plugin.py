"""The plugin ``ddp``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import thunder_xform as tx
from thunder_xform import parallel
from thunder_xform_ddp.options import Options


class DDP(tx.Plugin[Options]):
    """Data parallelism in the manner of ``torch.nn.parallel.DistributedDataParallel`` (Li et al., VLDB 2020)."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        #: Parameters with gradients in code compiled under no_sync.
        self._accumulating: set[str] = set()
        #: Parameters on which some outputs do not depend, so that ranks may have no gradient of them.
        self._optional: set[str] = set()

    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (parallel.process_group(self.options.process_group, "ddp"),)

    @tx.hookimpl
    def update_model_state(self, params: tx.Parameters, ctx: tx.Context) -> None:
        (self._group,) = self.process_groups()
        source = self.options.broadcast_from
        names = [*params, *params.buffers]
        with parallel.together([self._group], "The check of the model by plugin 'ddp'"):
            _refuse_source(source, dist.get_world_size(self._group))
            _refuse_unusable({name: params.tensor(name) for name in names})
        for name in names:
            written = source is not None or params.version(name).kind == "buffer" or params.tensor(name).requires_grad
            if written and _shares_storage(params.tensor(name), params.original(name)):
                params.replace(name, params.tensor(name).detach().clone())
        option = self.options.process_group
        for name in params:
            params.replicate(name, option if isinstance(option, DeviceMesh) else self._group)
        if source is not None:
            parallel.broadcast([params.tensor(name).detach() for name in names], source, self._group)
        if self.options.release_originals:
            params.release_originals()

    @tx.hookimpl
    def guard_key(self, ctx: tx.Context) -> bool:
        return ctx.no_sync

    @tx.hookimpl
    def before_autograd(self, computation: tx.Computation, ctx: tx.Context) -> tx.Computation:
        self._optional.update(computation.optional_parameters)
        if ctx.no_sync:
            self._accumulating.update(computation.differentiable_parameters)
            return computation
        plan = self._plan(computation, ctx)
        reached = {name for names in plan for name in names}

        def strays() -> list[str]:
            # What other code paths of the model accumulated: no bucket of this one reduces it.
            return sorted(self._accumulating - reached)

        return computation.restore([self._bucket(names, ctx, strays if names is plan[0] else list) for names in plan])

    def _plan(self, computation: tx.Computation, ctx: tx.Context) -> list[list[str]]:
        """Parameter names per bucket, in the order in which the backward finishes their gradients."""
        names = list(reversed(computation.differentiable_parameters))
        stored = {name: ctx.tensor(name) for name in names}
        by_tensor = {id(tensor): name for name, tensor in stored.items()}
        chunks = parallel.in_chunks(list(stored.values()), int(self.options.bucket_cap_mb * 2**20))
        return [[by_tensor[id(tensor)] for tensor in chunk] for chunk in chunks]

    def _bucket(
        self, names: Sequence[str], ctx: tx.Context, strays: Callable[[], list[str]]
    ) -> tuple[Sequence[str], Any]:
        def live(names: Sequence[str]) -> list[torch.Tensor]:
            return [ctx.parameter(name) for name in names]

        bucket = parallel.ReplicatedBucket(
            names,
            lambda: live(names),
            self._group,
            lambda: live(strays()),
            self._optional.intersection(names),
            lambda: live([name for name in strays() if name in self._optional]),
            lambda: ctx.unreached,
        )
        return names, lambda *stored: parallel.replicate(bucket, *stored)

    @tx.hookimpl
    def after_optimization(self, schedule: tx.Schedule) -> tx.Schedule:
        return schedule.delay(parallel.reduce_start, parallel.reduce_wait)

    @tx.hookimpl
    def sync_gradients(self, ctx: tx.Context) -> None:
        cap = int(self.options.bucket_cap_mb * 2**20)
        optional = [ctx.parameter(name) for name in sorted(self._optional)]
        parallel.reduce_accumulated(ctx.parameters.values(), self._group, cap, optional)


def _refuse_source(source: int | None, world: int) -> None:
    if source is not None and not 0 <= source < world:
        raise tx.errors.ParallelError(
            f"Plugin 'ddp' shall broadcast from rank {source}, but its process group has {world} ranks.",
            f"Set broadcast_from to a rank between 0 and {world - 1}.",
        )


def _refuse_unusable(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse tensors without data, and models spread over several devices."""
    devices: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise tx.errors.ParallelError(
                f"Plugin 'ddp' cannot replicate {name!r}, which has no data (device meta).",
                "Materialize the model first, or use the plugin 'fsdp', which initializes shard by shard.",
            )
        devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        (first, a), (second, b) = list(devices.items())[:2]
        raise tx.errors.ParallelError(
            f"Plugin 'ddp' found {a!r} on {first} and {b!r} on {second}, but a replica lives on one device.",
            "Move the model to one device before thunder.jit.",
        )


def _shares_storage(tensor: torch.Tensor, original: torch.Tensor | None) -> bool:
    """Whether writing to ``tensor`` changes the user's module."""
    return original is not None and tensor.untyped_storage().data_ptr() == original.untyped_storage().data_ptr()
