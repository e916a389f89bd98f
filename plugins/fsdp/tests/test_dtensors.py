"""Modules that are distributed before they are compiled."""

import re

import pytest
import thunder
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import thunder_xform as tx


def jit(model):
    return thunder.jit(model, transforms=tx.registry.resolve(["fsdp"]))


def refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    messages = []
    for kind in ("fully_shard", "one layer", "parameter", "buffer"):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        if kind == "fully_shard":
            fully_shard(module, mesh=mesh)
        elif kind == "one layer":
            fully_shard(module[1], mesh=mesh)
        elif kind == "parameter":
            module[0].weight = torch.nn.Parameter(distribute_tensor(module[0].weight.data, mesh, [Replicate()]))
        else:
            module.register_buffer("shift", distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
        with pytest.raises(tx.errors.PipelineError) as error:
            jit(module)
        messages.append(str(error.value))
    return messages


def test_modules_that_hold_dtensors_are_refused(ranks):
    """V11."""
    told = ranks.run(refused)[0]
    names = [re.search(r"holds ('\S+') as a DTensor", text).group(1) for text in told]
    assert names == ["'0.weight'", "'1.weight'", "'0.weight'", "'shift'"]
    assert told[3] == (
        "Sequential holds 'shift' as a DTensor in (Replicate(),). Pass the plain module to thunder.jit, before "
        "fully_shard or parallelize_module: plugins shard it."
    )
