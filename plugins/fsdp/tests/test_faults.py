"""A rank that dies."""

import os

import pytest
import torch
import torch.distributed as dist

import thunder_xform as tx
from thunder_xform.testing import RankPool, RanksFailed


def die_in_backward():
    import thunder

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    pipeline = tx.registry.resolve(["fsdp"], options={"fsdp": {"units": "layer"}})
    model = thunder.jit(model, transforms=pipeline)
    model(torch.randn(2, 8)).sum().backward()
    dist.barrier()
    x = torch.randn(2, 8)
    out = model(x)
    if dist.get_rank() == 1:
        out.register_hook(lambda gradient: os._exit(17))
    out.sum().backward()


def test_the_others_end_when_one_rank_dies_in_the_backward():
    """Within the grace that the test kit gives them: three seconds."""
    with RankPool(2, timeout=100) as pool, pytest.raises(RanksFailed) as failed:
        pool.run(die_in_backward)
    assert "exit code 17" in failed.value.reports[1]
    survivor = failed.value.reports[0]
    assert "still running" not in survivor
    assert "onnection" in survivor
    assert "die_in_backward" in survivor
