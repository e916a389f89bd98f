"""The plugin ``fsdp``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import thunder_xform as tx
from thunder_xform import parallel
from thunder_xform_fsdp.materialize import initializer, refuse_uninitializable
from thunder_xform_fsdp.options import Options
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
        self._buckets: list[parallel.ShardedBucket] = []
        self._home: dict[str, tuple[parallel.ShardedBucket, int]] = {}
        self._leftovers = parallel.AfterBackward(lambda: self._reduce_leftovers(ctx))
        names = list(params)
        device = self._device(params)
        self._check(params, ctx)
        paths = unit_paths(ctx.module, self.options.units)
        keyed: dict[_BucketKey, list[str]] = {}
        for name in names:
            version = params.version(name)
            unit = unit_of(name, paths, self.options.units)
            key = (unit, version.dtype, version.requires_grad, self._wire_dtype(params, name))
            keyed.setdefault(key, []).append(name)
        fresh = initializer(ctx.module, device)
        for key, members in keyed.items():
            self._shard(key, members, params, ctx, device, fresh)
        self._place_buffers(params, device, fresh)
        if self.options.release_originals:
            params.release_originals()

    def _check(self, params: tx.Parameters, ctx: tx.Context) -> None:
        world = dist.get_world_size(self._group)
        source = self.options.broadcast_from
        if source is not None and not 0 <= source < world:
            raise tx.errors.ParallelError(
                f"Plugin 'fsdp' shall broadcast from rank {source}, but its process group has {world} ranks.",
                f"Set broadcast_from to a rank between 0 and {world - 1}.",
            )
        if self.options.meta_init == "reset":
            everything = (*params, *params.buffers)
            refuse_uninitializable(ctx.module, [name for name in everything if params.tensor(name).is_meta])

    def _device(self, params: tx.Parameters) -> torch.device:
        if self.options.device is not None:
            return torch.device(self.options.device)
        found = {params.tensor(name).device: name for name in reversed(list(params))}
        real = {device: name for device, name in found.items() if device.type != "meta"}
        if len(real) > 1:
            (first, a), (second, b) = list(real.items())[:2]
            raise tx.errors.ParallelError(
                f"Plugin 'fsdp' found {a!r} on {first} and {b!r} on {second}.",
                "Move the model to one device, or set the option device.",
            )
        if real:
            return next(iter(real))
        on_cuda = "nccl" in dist.get_backend(self._group)
        return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    def _shard(
        self,
        key: _BucketKey,
        names: list[str],
        params: tx.Parameters,
        ctx: tx.Context,
        device: torch.device,
        fresh: Callable[[str], torch.Tensor],
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
            lambda: [ctx.tensor(name) for name in names],
            self._leftovers.request,
            wire_dtype,
            getattr(torch, options.reduce_dtype) if options.reduce_dtype else None,
        )
        layout = f"rows {bucket.rank}/{bucket.layout.world}"
        for index, name in enumerate(names):
            whole = self._agreed(params, name, self._value(params, name, device, fresh))
            params.replace(name, bucket.store(index, whole), layout=layout)
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

    def _value(
        self, params: tx.Parameters, name: str, device: torch.device, fresh: Callable[[str], torch.Tensor]
    ) -> torch.Tensor:
        """The whole tensor to shard, on ``device``; never the user's own storage."""
        tensor = params.tensor(name).detach()
        if not tensor.is_meta:
            return tensor.to(device, copy=True)
        if self.options.meta_init == "empty":
            return torch.zeros_like(tensor, device=device)
        return fresh(name)

    def _agreed(self, params: tx.Parameters, name: str, whole: torch.Tensor) -> torch.Tensor:
        added = params.version(name).origin != "model"
        source = 0 if added and self.options.broadcast_from is None else self.options.broadcast_from
        if source is not None:
            parallel.broadcast([whole], source, self._group)
        return whole

    def _place_buffers(self, params: tx.Parameters, device: torch.device, fresh: Callable[[str], torch.Tensor]) -> None:
        for name in params.buffers:
            params.replace(name, self._agreed(params, name, self._value(params, name, device, fresh)))

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
                parameter = ctx.tensor(name)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _reduce_leftovers(self, ctx: tx.Context) -> None:
        """With a reducing backward everything is due, also what it did not reach."""
        if any(bucket.holds_gradients for bucket in self._buckets):
            ctx.sync_gradients()

    @tx.hookimpl
    def gradient_norm(self, parameters: list[torch.nn.Parameter], norm_type: float) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
            return norm
        power = norm**norm_type
        dist.all_reduce(power, group=self._group)
        return power ** (1.0 / norm_type)

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
