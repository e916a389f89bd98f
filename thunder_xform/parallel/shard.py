"""Operators of sharded parameters: buckets that are gathered before use and whose gradients are reduced into shards.

``gather_start`` and ``gather_wait`` put an asynchronous all-gather between the stored shards and the model's operators;
the gradient of ``gather_wait`` reduce-scatters (``scatter_start``, ``scatter_wait``), or, while gradients accumulate
locally, keeps them unsharded (``stash``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_xform.host.operators import operator, tensor_like
from thunder_xform.parallel.bucket import ShardedBucket


def _token(proxy: Any) -> Any:
    return tensor_like(proxy, shape=(0,), requires_grad=False)


def _wholes(bucket: ShardedBucket, indices: Any, train: Any, sync: bool, token: Any, *shards: Any) -> tuple[Any, ...]:
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


#: ``gather_start(bucket, indices, *shards) -> token of the gather in flight``
gather_start = operator(
    "xform_gather_start",
    meta=lambda bucket, indices, *shards: _token(shards[0]),
    fn=lambda bucket, indices, *shards: bucket.start_gather(indices, shards),
    backward=lambda inputs, outputs, gradients: [None] * len(inputs),
    collective=True,
)

#: ``gather_wait(bucket, indices, train, sync, token, *shards) -> whole tensors``; the tensors whose index is in
#: ``train`` get gradients: reduced into shards if ``sync``, else stashed.
gather_wait = operator(
    "xform_gather_wait",
    meta=_wholes,
    fn=lambda bucket, indices, train, sync, token, *shards: bucket.finish_gather(indices, token, shards),
    backward=_gather_backward,
    collective=True,
    one_to_one=True,
)

#: ``scatter_start(bucket, indices, *gradients) -> token of the reduction in flight``
scatter_start = operator(
    "xform_scatter_start",
    meta=lambda bucket, indices, *gradients: _token(gradients[0]),
    fn=lambda bucket, indices, *gradients: bucket.start_scatter(indices, gradients),
    collective=True,
    side_effects=True,
)

#: ``scatter_wait(bucket, indices, token, *shards) -> averaged gradients``
scatter_wait = operator(
    "xform_scatter_wait",
    meta=lambda bucket, indices, token, *shards: tuple(tensor_like(s, requires_grad=False) for s in shards),
    fn=lambda bucket, indices, token, *shards: bucket.finish_scatter(indices, token, shards),
    collective=True,
)

#: ``stash(bucket, indices, *gradients)``: accumulate locally.
stash = operator(
    "xform_stash_gradients",
    meta=lambda bucket, indices, *gradients: None,
    fn=lambda bucket, indices, *gradients: bucket.stash(indices, gradients),
    side_effects=True,
)
