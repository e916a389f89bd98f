"""Process groups and meshes, collective operators, gradient synchronization, agreement between ranks."""

from __future__ import annotations

from thunder_xform.parallel.accumulation import AfterBackward, accumulates
from thunder_xform.parallel.agreement import agree_on, gather_objects, together
from thunder_xform.parallel.bucket import ShardedBucket
from thunder_xform.parallel.collectives import broadcast, in_chunks
from thunder_xform.parallel.groups import process_group
from thunder_xform.parallel.replicate import (
    ReplicatedBucket,
    reduce_accumulated,
    reduce_start,
    reduce_wait,
    replicate,
)
from thunder_xform.parallel.shard import (
    gather_start,
    gather_wait,
    scatter_start,
    scatter_wait,
    stash,
)
from thunder_xform.parallel.sharded import add_gradient, local

__all__ = [
    "AfterBackward",
    "ReplicatedBucket",
    "ShardedBucket",
    "accumulates",
    "add_gradient",
    "agree_on",
    "broadcast",
    "gather_objects",
    "gather_start",
    "gather_wait",
    "in_chunks",
    "local",
    "process_group",
    "reduce_accumulated",
    "reduce_start",
    "reduce_wait",
    "replicate",
    "scatter_start",
    "scatter_wait",
    "stash",
    "together",
]
