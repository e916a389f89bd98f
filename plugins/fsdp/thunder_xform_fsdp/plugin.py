"""The plugin ``fsdp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import thunder_xform as tx
from thunder_xform import parallel
from thunder_xform_fsdp.materialize import MetaInit
from thunder_xform_fsdp.options import Options
from thunder_xform_fsdp.placement import device_of, refuse_source
from thunder_xform_fsdp.units import unit_of, unit_paths

_BucketKey = tuple[str, torch.dtype, bool, torch.dtype | None]


class FSDP(tx.Plugin[Options]):
    """Fully sharded data parallelism: ZeRO stages 2 and 3 (Rajbhandari et al., SC 2020), in FSDP2's dim-0 layout."""

    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (parallel.process_group(self.options.process_group, "fsdp"),)

    # -- state ---------------------------------------------------------------------------------------------------

    @tx.hookimpl
    def update_model_state(self, params: tx.Parameters, ctx: tx.Context) -> None:
        (self._group,) = self.process_groups()
        option = self.options.process_group
        self._mesh = option if isinstance(option, DeviceMesh) else self._group
        self._buckets: list[parallel.ShardedBucket] = []
        self._home: dict[str, tuple[parallel.ShardedBucket, int]] = {}
        self._leftovers = parallel.AfterBackward(lambda: self._reduce_leftovers(ctx))
        refuse_source(self.options, self._group)
        device = device_of(params, self.options, self._group)
        self._init = MetaInit(ctx.module, device, empty=self.options.meta_init == "empty")
        self._init.refuse(name for name in (*params, *params.buffers) if params.tensor(name).is_meta)
        paths = unit_paths(ctx.module, self.options.units)
        keyed: dict[_BucketKey, list[str]] = {}
        for name in params:
            version = params.version(name)
            unit = unit_of(name, paths, self.options.units)
            key = (unit, version.dtype, version.requires_grad, self._wire_dtype(params, name))
            keyed.setdefault(key, []).append(name)
        for key, members in keyed.items():
            self._shard(key, members, params, ctx, device)
        for name in params.buffers:
            params.replace(name, self._agreed(params, name, device))
        if self.options.release_originals:
            params.release_originals()

    def _shard(
        self,
        key: _BucketKey,
        names: list[str],
        params: tx.Parameters,
        ctx: tx.Context,
        device: torch.device,
    ) -> None:
        unit, dtype, trainable, wire_dtype = key
        options = self.options
        bucket = parallel.ShardedBucket(
            f"{unit or 'root'}, {str(dtype).removeprefix('torch.')}, {'trainable' if trainable else 'frozen'}",
            names,
            [tuple(params.tensor(name).shape) for name in names],
            dtype,
            device,
            self._group,
            lambda: [ctx.parameter(name) for name in names],
            self._leftovers.request,
            wire_dtype,
            getattr(torch, options.reduce_dtype) if options.reduce_dtype else None,
            unreached=lambda: ctx.unreached,
        )
        layout = f"rows {bucket.rank}/{bucket.layout.world}"
        for index, name in enumerate(names):
            shard = bucket.store(index, self._agreed(params, name, device))
            params.replace(name, shard, layout=layout, mesh=self._mesh, placement=Shard(0))
            self._home[name] = (bucket, index)
        self._buckets.append(bucket)

    def _wire_dtype(self, params: tx.Parameters, name: str) -> torch.dtype | None:
        """Dtype to gather a parameter in, or None for its own: what belongs to a packed weight is never rounded."""
        version = params.version(name)
        weight = version.layout == "dense" and (version.origin == "model" or version.requires_grad)
        if self.options.gather_dtype is None or not version.dtype.is_floating_point or not weight:
            return None
        dtype: torch.dtype = getattr(torch, self.options.gather_dtype)
        return dtype

    def _agreed(self, params: tx.Parameters, name: str, device: torch.device) -> torch.Tensor:
        """The whole tensor that all ranks start from, on ``device``; never the user's own storage."""
        tensor = params.tensor(name).detach()
        whole = self._init(name) if tensor.is_meta else tensor.to(device, copy=True)
        added = params.version(name).origin != "model"
        source = 0 if added and self.options.broadcast_from is None else self.options.broadcast_from
        if source is not None:
            parallel.broadcast([whole], source, self._group)
        return whole

    # -- compilation ---------------------------------------------------------------------------------------------

    @tx.hookimpl
    def guard_key(self, ctx: tx.Context) -> bool:
        return self._synchronizes(ctx)

    def _synchronizes(self, ctx: tx.Context) -> bool:
        return self.options.reduce_each_microbatch or not ctx.no_sync

    @tx.hookimpl
    def before_autograd(self, computation: tx.Computation, ctx: tx.Context) -> tx.Computation:
        trained = set(computation.differentiable_parameters)
        used: dict[int, list[str]] = {}
        for name in computation.parameters:
            if name in self._home:
                used.setdefault(id(self._home[name][0]), []).append(name)
        for name in computation.optional_parameters:
            if name in self._home:
                bucket, index = self._home[name]
                bucket.optional.add(index)
        sync = self._synchronizes(ctx)
        groups = [self._gathering(names, trained, sync) for names in used.values()]
        return computation.restore(groups, recompute=self.options.zero == 3)

    def _gathering(self, names: list[str], trained: set[str], sync: bool) -> tuple[Sequence[str], Any]:
        bucket = self._home[names[0]][0]
        names = sorted(names, key=lambda name: self._home[name][1])
        indices = tuple(self._home[name][1] for name in names)
        train = tuple(self._home[name][1] for name in names if name in trained)

        def gather(*shards: Any) -> Any:
            buffer = parallel.gather_start(bucket, indices, *shards)
            return parallel.gather_wait(bucket, indices, train, sync, buffer, *shards)

        return names, gather

    @tx.hookimpl
    def after_optimization(self, schedule: tx.Schedule) -> tx.Schedule:
        schedule = schedule.prefetch(parallel.gather_start, parallel.gather_wait, ahead=self.options.prefetch)
        return schedule.delay(parallel.scatter_start, parallel.scatter_wait, in_flight=1)

    # -- gradients and state -------------------------------------------------------------------------------------

    @tx.hookimpl
    def sync_gradients(self, ctx: tx.Context) -> None:
        for bucket in self._buckets:
            for name, gradient in bucket.reduce_stash().items():
                parallel.add_gradient(ctx.parameter(name), gradient)

    @tx.hookimpl
    def discard_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.discard_stash()

    def _reduce_leftovers(self, ctx: tx.Context) -> None:
        """With a reducing backward everything is due, also what it did not reach."""
        if any(bucket.holds_gradients for bucket in self._buckets):
            ctx.sync_gradients()

    @tx.hookimpl
    def export_state(self, state: dict[str, torch.Tensor], ctx: tx.Context) -> dict[str, torch.Tensor]:
        if ctx.state_kind == "sharded":
            return state
        wanted = {id(self._home[name][0]) for name in state if name in self._home}
        whole: dict[str, torch.Tensor] = {}
        for bucket in self._buckets:
            if id(bucket) in wanted:
                whole |= bucket.gather()
        return {name: whole.get(name, tensor) for name, tensor in state.items()}

    @tx.hookimpl
    def import_state(self, state: dict[str, torch.Tensor], ctx: tx.Context) -> dict[str, torch.Tensor]:
        if ctx.state_kind == "sharded":
            return state
        return {name: self._rows(name, tensor) for name, tensor in state.items()}

    def _rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self._home:
            return tensor
        bucket, index = self._home[name]
        return bucket.layout.cut(tensor, index, bucket.rank)
