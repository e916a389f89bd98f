"""Both ways for the tensors of a bucket to travel, on three ranks: whole tensors and sums, told without them."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from thunder_xform.parallel.exchange import DirectExchange, PackedExchange
from thunder_xform.parallel.layout import ShardLayout
from thunder_xform.testing import Traffic

#: Uneven, fewer rows than ranks, a scalar, nothing at all, and even.
SHAPES = [(5, 2), (1, 3), (), (0, 4), (6, 2)]
KINDS = [DirectExchange, PackedExchange]


def made(rank, kind=0):
    """Small integers, so that sums are exact; different for each rank, tensor and ``kind``."""
    generator = torch.Generator().manual_seed(10 * kind + rank)
    return [torch.randint(0, 50, shape, generator=generator).float() for shape in SHAPES]


def gathered(exchange_type):
    """Whether each rank gets what the others cut from the same tensors, and in a subgroup."""
    rank, tensors = dist.get_rank(), made(0)
    found = []
    for group in (dist.group.WORLD, dist.new_group([1, 2])):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        own = dist.get_rank(group)
        layout = ShardLayout(SHAPES, dist.get_world_size(group))
        local = torch.full((layout.shard_numel,), -1.0)
        for index, tensor in enumerate(tensors):
            layout.local(local, index, own).copy_(layout.cut(tensor, index, own))
        finish = exchange_type(layout, group, torch.float32).gather(local)
        found += [torch.equal(a, b) for a, b in zip(finish(), tensors, strict=True)]
    return len(found) == (5 if rank == 0 else 10) and all(found)


@pytest.mark.parametrize("exchange_type", KINDS)
def test_gather(three_ranks, exchange_type):
    assert three_ranks.run(gathered, exchange_type) == [True] * 3


def shards_of(layout, flat):
    return [layout.local(flat, index, dist.get_rank()) for index in range(len(layout))]


def reduced(exchange_type, dtype, microbatches, last):
    """This rank's shards of the sum of ``microbatches`` stashed gradients and of those that come ``last``, by index."""
    layout = ShardLayout(SHAPES, dist.get_world_size())
    exchange = exchange_type(layout, dist.group.WORLD, dtype)
    stash, given = None, {}
    for k in range(microbatches):
        given = dict(enumerate(made(dist.get_rank(), k)))
        del given[1 + k % 2]  # not each microbatch reaches each parameter
        stash = exchange.accumulate(stash, given)
    everything = made(dist.get_rank(), 9)
    before = [t.clone() for t in everything]
    flat = exchange.reduce(stash, {index: everything[index] for index in last})()
    kept = all(torch.equal(a, b) for a, b in zip(everything, before, strict=True))
    return kept, str(flat.dtype), [t.clone() for t in shards_of(layout, flat)]


@pytest.mark.parametrize("exchange_type", KINDS)
@pytest.mark.parametrize(("microbatches", "last"), [(0, [0, 1, 2, 3, 4]), (0, [0, 4]), (3, [0, 2]), (2, [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reduce(three_ranks, exchange_type, dtype, microbatches, last):
    """A plain sum over ranks and microbatches; what has no gradient anywhere is zero; gradients stay as they are."""
    total = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    for rank in range(3):
        for k in range(microbatches):
            for index, gradient in enumerate(made(rank, k)):
                if index != 1 + k % 2:
                    total[index] += gradient
        for index in last:
            total[index] += made(rank, 9)[index]
    layout = ShardLayout(SHAPES, 3)
    for rank, (kept, found_dtype, shards) in enumerate(
        three_ranks.run(reduced, exchange_type, dtype, microbatches, last)
    ):
        assert kept
        assert found_dtype == str(dtype)
        for index, shard in enumerate(shards):
            expected = layout.cut(total[index], index, rank)
            assert shard.shape == expected.shape
            assert torch.equal(shard, expected)


def transposed():
    """A gradient of any strides, and one that two parameters share, as a backward may give them."""
    layout = ShardLayout([(4, 3), (4, 3)], dist.get_world_size())
    gradient = torch.arange(12.0).view(3, 4).mT
    exchange = DirectExchange(layout, dist.group.WORLD, torch.float32)
    stash = exchange.accumulate(None, {0: gradient, 1: gradient})
    stash = exchange.accumulate(stash, {0: gradient})
    flat = exchange.reduce(stash, {1: gradient})()
    expected = layout.cut(6 * gradient, 0, dist.get_rank())
    return [torch.equal(shard, expected) for shard in shards_of(layout, flat)]


def test_strides_and_shared_gradients(three_ranks):
    assert three_ranks.run(transposed) == [[True, True]] * 3


def in_flight(exchange_type):
    """Several at a time, while the user's own messages fly between the same ranks; waits in the opposite order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % world, (rank - 1) % world
    theirs = torch.empty(4)
    users = [dist.irecv(theirs, previous), dist.isend(torch.full((4,), 100.0 + rank), following)]
    layouts = [ShardLayout([(3, 2)], world), ShardLayout([(3,), (6,)], world)]
    small, large = (exchange_type(layout, dist.group.WORLD, torch.float32) for layout in layouts)
    pending = [
        small.gather(torch.full((2,), float(rank))),
        large.reduce(None, {0: torch.arange(3.0), 1: torch.arange(6.0)}),
        large.gather(torch.full((3,), 10.0 + rank)),
    ]
    third, second, first = [finish() for finish in reversed(pending)]
    for work in users:
        work.wait()
    return [
        first[0][:, 0].tolist() == [0.0, 1.0, 2.0],
        second.tolist() == [3.0 * rank, 6.0 * rank, 6.0 * rank + 3],
        third[1].tolist() == [10.0, 10.0, 11.0, 11.0, 12.0, 12.0],
        theirs.unique().tolist() == [100.0 + previous],
    ]


@pytest.mark.parametrize("exchange_type", KINDS)
def test_several_in_flight(three_ranks, exchange_type):
    assert three_ranks.run(in_flight, exchange_type) == [[True] * 4] * 3


def traffic(exchange_type):
    layout = ShardLayout([(6, 2), (3,)], dist.get_world_size())
    exchange = exchange_type(layout, dist.group.WORLD, torch.float32)
    with Traffic() as seen:
        exchange.gather(torch.ones(layout.shard_numel))()
        exchange.reduce(None, {0: torch.ones(6, 2), 1: torch.ones(3)})()
        users = [dist.irecv(torch.empty(4), 0) if dist.get_rank() else dist.isend(torch.ones(4), 1)]
        users += [dist.isend(torch.ones(4), 2)] if dist.get_rank() == 0 else []
        for work in users:
            work.wait()
    return [tuple(c) for c in seen.collectives]


def test_traffic(three_ranks):
    """Packed, a collective moves the whole bucket of 60 bytes; direct messages leave out what a rank has itself."""
    users = [[("send", 16), ("send", 16)], [("recv", 16)], [("recv", 16)]]
    for exchange_type, nbytes in ((PackedExchange, 60), (DirectExchange, 40)):
        expected = [("all_gather", nbytes), ("reduce_scatter", nbytes)]
        assert three_ranks.run(traffic, exchange_type) == [expected + messages for messages in users]


def apart():
    """V34: one rank gathers what the other reduces, then another bucket of the same size."""
    rank, ended = dist.get_rank(), []
    for number, (first, second) in enumerate([("gather", "reduce"), ("a", "b")]):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        if rank == 2:
            continue
        mine = (first, second)[rank]
        exchange = DirectExchange(ShardLayout([(2, 2)], 2), group, torch.float32, mine if number else "a")
        flight = exchange.reduce(None, {0: torch.ones(2, 2)}) if mine == "reduce" else exchange.gather(torch.ones(2))
        try:
            ended.append(flight())
        except RuntimeError:
            ended.append("refused")
    return ended


def test_messages_of_another_kind_or_bucket_never_arrive(three_ranks):
    assert three_ranks.run(apart) == [["refused"] * 2, ["refused"] * 2, []]
