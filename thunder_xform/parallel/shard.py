"""Operators of sharded parameters: buckets that are gathered before use and whose gradients are reduced into shards.

``gather_start`` and ``gather_wait`` put an asynchronous all-gather between the stored shards and the model's operators;
the gradient of ``gather_wait`` reduce-scatters (``scatter_start``, ``scatter_wait``), or, while gradients accumulate
locally, keeps them unsharded (``stash``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_xform.host.operators import operator, tensor_like
from thunder_xform.parallel.bucket import ShardedBucket


def _flat_like(numel: int, proxy: Any, dtype: torch.dtype | None = None) -> Any:
    return tensor_like(proxy, shape=(numel,), dtype=dtype, requires_grad=False)


def _wholes(bucket: ShardedBucket, indices: Any, train: Any, sync: bool, full: Any, *shards: Any) -> tuple[Any, ...]:
    return tuple(
        tensor_like(shard, shape=bucket.layout.whole_shape(index)) for index, shard in zip(indices, shards, strict=True)
    )


def _gather_backward(inputs: tuple[Any, ...], outputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> Sequence[Any]:
    bucket, indices, train, sync, _, *shards = inputs
    result: list[Any] = [None] * len(inputs)
    positions = [i for i, index in enumerate(indices) if index in train]
    wanted = [gradients[i] for i in positions]
    if not wanted:
        return result
    if not sync:
        stash(bucket, train, *wanted)
        return result
    reduced = scatter_start(bucket, train, *wanted)
    pieces = scatter_wait(bucket, train, reduced, *[shards[i] for i in positions])
    for position, piece in zip(positions, pieces, strict=True):
        result[len(inputs) - len(shards) + position] = piece
    return result


#: ``gather_start(bucket, indices, *shards) -> buffer in flight``
gather_start = operator(
    "xform_gather_start",
    meta=lambda bucket, indices, *shards: _flat_like(bucket.gathered_numel, shards[0], bucket.gather_dtype),
    fn=lambda bucket, indices, *shards: bucket.start_gather(indices, shards),
    backward=lambda inputs, outputs, gradients: [None] * len(inputs),
    collective=True,
)

#: ``gather_wait(bucket, indices, train, sync, buffer, *shards) -> whole tensors``; the tensors whose index is in
#: ``train`` get gradients: reduced into shards if ``sync``, else stashed.
gather_wait = operator(
    "xform_gather_wait",
    meta=_wholes,
    fn=lambda bucket, indices, train, sync, full, *shards: bucket.finish_gather(indices, full, shards),
    backward=_gather_backward,
    collective=True,
)

#: ``scatter_start(bucket, indices, *gradients) -> shard of the sum, in flight``
scatter_start = operator(
    "xform_scatter_start",
    meta=lambda bucket, indices, *gradients: _flat_like(bucket.layout.shard_numel, gradients[0], bucket._reduce_dtype),
    fn=lambda bucket, indices, *gradients: bucket.start_scatter(indices, gradients),
    collective=True,
    side_effects=True,
)

#: ``scatter_wait(bucket, indices, shard, *shards) -> averaged gradients``
scatter_wait = operator(
    "xform_scatter_wait",
    meta=lambda bucket, indices, reduced, *shards: tuple(tensor_like(s, requires_grad=False) for s in shards),
    fn=lambda bucket, indices, reduced, *shards: bucket.finish_scatter(indices, reduced, shards),
    collective=True,
)

#: ``stash(bucket, indices, *gradients)``: accumulate locally.
stash = operator(
    "xform_stash_gradients",
    meta=lambda bucket, indices, *gradients: None,
    fn=lambda bucket, indices, *gradients: bucket.stash(indices, gradients),
    side_effects=True,
)
