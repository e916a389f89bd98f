"""Laws of dim-0 shards in flat buffers."""

import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from thunder_xform.parallel.layout import ShardLayout

SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4)
WORLDS = st.integers(1, 5)

#: Uneven, smaller than the world, a scalar, empty in the first and in another dimension.
AWKWARD = [(5, 2), (1, 3), (), (0, 4), (3, 0), (4, 1)]


def numbered(shapes):
    """Tensors of the given shapes whose elements are all different."""
    total = sum(math.prod(shape) for shape in shapes)
    parts = torch.arange(1.0, total + 1).split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def chunks(tensor, world):
    """What torch.chunk gives each rank: as many rows as it has chunks for, then none. A scalar is one row."""
    rows = tensor.reshape(1) if not tensor.ndim else tensor
    found = list(rows.chunk(world)) if rows.shape[0] else []
    return found + [rows[:0]] * (world - len(found))


def gathered(layout, tensors):
    """The rank-major buffer that an all-gather of every rank's flat shard fills."""
    flats = []
    for rank in range(layout.world):
        flat = torch.full((layout.shard_numel,), -1.0)
        for index, tensor in enumerate(tensors):
            layout.local(flat, index, rank).copy_(layout.cut(tensor, index, rank))
        flats.append(flat)
    return torch.cat(flats)


@given(SHAPES, WORLDS)
@example(AWKWARD, 4)
def test_cuts_are_those_of_chunk(shapes, world):
    layout, tensors = ShardLayout(shapes, world), numbered(shapes)
    for index, tensor in enumerate(tensors):
        for rank, expected in enumerate(chunks(tensor, world)):
            piece = layout.cut(tensor, index, rank)
            assert piece.shape == layout.shard_shape(index, rank) == expected.shape
            assert torch.equal(piece, expected)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple), WORLDS)
def test_shapes_are_those_of_dtensor(shape, world):
    from torch.distributed.tensor import Shard

    layout = ShardLayout([shape], world)
    shards, _ = Shard(0)._split_tensor(torch.empty(shape), world, with_padding=False)
    assert [layout.shard_shape(0, rank) for rank in range(world)] == [tuple(shard.shape) for shard in shards]


@given(SHAPES, WORLDS)
@example(AWKWARD, 4)
def test_gathering_restores_the_whole(shapes, world):
    layout, tensors = ShardLayout(shapes, world), numbered(shapes)
    flats = gathered(layout, tensors).view(world, -1)
    for index, tensor in enumerate(tensors):
        assert layout.whole_shape(index) == tensor.shape
        assert torch.equal(layout.whole(flats, index), tensor)


@given(SHAPES, WORLDS)
@example(AWKWARD, 4)
def test_pieces_do_not_overlap(shapes, world):
    layout = ShardLayout(shapes, world)
    for rank in range(world):
        flat = torch.zeros(layout.shard_numel)
        for index in range(len(shapes)):
            layout.local(flat, index, rank).add_(1)
        assert flat.max().item() <= 1 if flat.numel() else True
        padding = int((flat == 0).sum())
        assert padding == layout.shard_numel - sum(math.prod(layout.shard_shape(i, rank)) for i in range(len(shapes)))
        assert not padding or layout.padded


@given(SHAPES, WORLDS, st.data())
@example(AWKWARD, 4, None)
def test_packing_is_what_gathering_gives(shapes, world, data):
    """Packed tensors are cut into the same places as gathered ones, and others stay as they are."""
    layout, tensors = ShardLayout(shapes, world), numbered(shapes)
    chosen = range(len(shapes)) if data is None else data.draw(st.sets(st.integers(0, len(shapes) - 1)))
    full = torch.full((layout.shard_numel * world,), -1.0)
    layout.pack(full, [(i, tensors[i]) for i in chosen], add=False)
    expected = gathered(layout, tensors).view(world, -1)
    for index in range(len(shapes)):
        for rank, flat in enumerate(full.view(world, -1)):
            found = layout.local(flat, index, rank)
            wanted = layout.local(expected[rank], index, rank)
            assert torch.equal(found, wanted if index in chosen else torch.full_like(found, -1))


@given(SHAPES, WORLDS)
@example(AWKWARD, 4)
def test_packing_adds(shapes, world):
    layout, tensors = ShardLayout(shapes, world), numbered(shapes)
    full = torch.zeros(layout.shard_numel * world)
    layout.pack(full, enumerate(tensors), add=False)
    layout.pack(full, [(i, t * 10) for i, t in enumerate(tensors)], add=True)
    for index, tensor in enumerate(tensors):
        assert torch.equal(layout.whole(full.view(world, -1), index), tensor * 11)


@given(SHAPES, WORLDS)
@example(AWKWARD, 4)
def test_packing_takes_any_strides(shapes, world):
    layout, tensors = ShardLayout(shapes, world), numbered(shapes)
    transposed = [t.mT.contiguous().mT if t.ndim >= 2 else t for t in tensors]
    full = torch.zeros(layout.shard_numel * world)
    layout.pack(full, enumerate(transposed), add=False)
    for index, tensor in enumerate(tensors):
        assert torch.equal(layout.whole(full.view(world, -1), index), tensor)


def test_one_rank_views_and_does_not_copy():
    layout = ShardLayout([(6, 2), (3,)], 1)
    flat = torch.arange(15.0)
    assert layout.whole([flat], 1).data_ptr() == flat[12:].data_ptr()
