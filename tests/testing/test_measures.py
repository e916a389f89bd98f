"""Trackers of live bytes and of collectives, on what can be computed by hand."""

import pytest
import torch
import torch.distributed as dist

from thunder_xform.testing import LiveBytes, Traffic

MEGA = 2**20


def megabytes(count):
    return torch.zeros(count * MEGA // 4)


def test_live_bytes_follow_storages():
    with LiveBytes() as live:
        a = megabytes(2)
        b = a.view(2, -1)[1]
        assert live.now() == 2 * MEGA, "a view has no memory of its own"
        del a
        assert live.now() == 2 * MEGA, "a view keeps the whole alive"
        c = b + 1
        assert live.now() == 3 * MEGA
        del b
        assert (live.now(), live.peak) == (MEGA, 3 * MEGA)
        live.restart()
        c.add_(1)
        c.untyped_storage().resize_(0)
        assert (live.now(), live.peak) == (0, MEGA)


def test_what_existed_before_counts_on_request():
    before = megabytes(4)
    with LiveBytes() as live:
        before.mul_(2)
        before[1:].add_(1)
        assert live.now() == 0
        live.track([before])
        assert (live.now(), live.peak) == (4 * MEGA, 4 * MEGA)
    assert live.now() == 4 * MEGA
    del before
    assert live.now() == 0


def test_live_bytes_in_a_backward():
    weight = torch.nn.Parameter(megabytes(1))
    with LiveBytes() as live:
        loss = weight.exp().sum()
        assert live.now() == MEGA + loss.nbytes, "exp is saved"
        loss.backward()
        del loss
    assert live.now() == weight.grad.nbytes == MEGA
    assert 2 * MEGA <= live.peak < 2.1 * MEGA


def collectives():
    world = dist.get_world_size()
    part, whole = torch.zeros(10), torch.zeros(10 * world)
    dist.broadcast(part, 0)
    with Traffic() as seen:
        dist.all_reduce(part)
        dist.all_gather_into_tensor(whole, part)
        dist.all_gather(list(whole.chunk(world)), part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(torch.empty_like(whole), whole)
        dist.broadcast(whole, 0)
        whole + 1
        loss = _Gathered.apply(part.requires_grad_()).sum()
        loss.backward()
    return [tuple(c) for c in seen.collectives], (seen.count("all_gather", "all_reduce"), seen.nbytes("all_gather"))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        return part * 2

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def test_traffic(ranks):
    for seen, sums in ranks.run(collectives):
        assert seen == [
            ("all_reduce", 40),
            ("all_gather", 80),
            ("all_gather", 80),
            ("reduce_scatter", 80),
            ("all_to_all", 80),
            ("broadcast", 80),
            ("all_reduce", 40),
        ]
        assert sums == (4, 160)


@pytest.fixture(scope="module")
def ranks():
    from thunder_xform.testing import RankPool

    with RankPool(2, preload=("torch",)) as pool:
        yield pool
