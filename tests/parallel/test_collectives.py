"""Flat collectives against what each rank can compute by itself."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from thunder_xform.parallel import broadcast, collectives, in_chunks, reduce_accumulated

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), max_size=12),
    st.integers(0, 100),
)
def test_chunks(sizes, cap):
    """In order and complete; of one dtype; within the limit or alone; none could have taken in the next tensor."""
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in sizes]
    chunks = list(in_chunks(tensors, cap))
    assert [id(t) for chunk in chunks for t in chunk] == [id(t) for t in tensors]
    for chunk in chunks:
        assert len({t.dtype for t in chunk}) == 1
        assert len(chunk) == 1 or sum(t.nbytes for t in chunk) <= cap
    for chunk, following in itertools.pairwise(chunks):
        fits = sum(t.nbytes for t in chunk) + following[0].nbytes <= cap
        assert not fits or chunk[0].dtype != following[0].dtype


def values(seed):
    """Tensors of many kinds, in the storage that a model might give them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(shape, generator=generator)

    return [
        random(3, 4),
        random(2, 3).double(),
        random(5).to(torch.bfloat16),
        random(5).half(),
        random(3, 4).t(),
        random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(0),
        random(1)[0],
        random(6) > 0.5,
        (random(3) * 100).long(),
        (random(3) * 100).to(torch.uint8),
        torch.complex(random(3), random(3)),
    ]


def broadcast_values(source, max_bytes):
    """Names of the kinds that differ from the source's, and whether strides were kept."""
    tensors = values(dist.get_rank())
    strides = [t.stride() for t in tensors]
    broadcast(tensors, source, dist.group.WORLD, max_bytes)
    different = [i for i, (a, b) in enumerate(zip(tensors, values(source), strict=True)) if not torch.equal(a, b)]
    return different, strides == [t.stride() for t in tensors]


@pytest.mark.parametrize("max_bytes", [0, 60, 2**20])
@pytest.mark.parametrize("source", [0, 1])
def test_broadcast(ranks, source, max_bytes):
    assert ranks.run(broadcast_values, source, max_bytes) == [([], True)] * 2


def broadcast_parameter():
    """A leaf that trains is written to without autograd noticing."""
    parameter = torch.nn.Parameter(torch.full((2,), float(dist.get_rank())))
    broadcast([parameter], 1, dist.group.WORLD)
    return parameter.tolist(), parameter.requires_grad, parameter.grad_fn is None


def test_broadcast_of_a_parameter(ranks):
    assert ranks.run(broadcast_parameter) == [([1.0, 1.0], True, True)] * 2


def flat_collectives():
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone = [torch.arange(6.0) + 10 * r for r in range(world)]
    summed = everyone[rank].clone()
    collectives.all_reduce(summed, dist.group.WORLD).wait()
    full = torch.empty(6 * world)
    collectives.all_gather(full, everyone[rank], dist.group.WORLD).wait()
    shard = torch.empty(3)
    collectives.reduce_scatter(shard, everyone[rank].clone(), dist.group.WORLD).wait()
    return {
        "all_reduce": torch.equal(summed, sum(everyone)),
        "all_gather": torch.equal(full, torch.cat(everyone)),
        "reduce_scatter": torch.equal(shard, sum(everyone)[3 * rank : 3 * rank + 3]),
    }


def test_flat_collectives(ranks):
    assert ranks.run(flat_collectives) == [{"all_reduce": True, "all_gather": True, "reduce_scatter": True}] * 2


def accumulated(max_bytes):
    """Gradients of this rank averaged; what has none keeps none."""
    shapes = [(2, 3), (4,), (), (5, 1)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for index, parameter in enumerate(parameters[:-1]):
        parameter.grad = torch.full(shapes[index], float(10 * index + dist.get_rank()))
    held = parameters[0].grad
    reduce_accumulated(parameters, dist.group.WORLD, max_bytes)
    return [p.grad.unique().tolist() for p in parameters[:-1]], parameters[-1].grad, parameters[0].grad is held


@pytest.mark.parametrize("max_bytes", [0, 30, 2**20])
def test_accumulated_gradients_are_averaged_in_place(ranks, max_bytes):
    assert ranks.run(accumulated, max_bytes) == [([[0.5], [10.5], [20.5]], None, True)] * 2
