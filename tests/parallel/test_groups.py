"""What names a process group, and what does not."""

import pytest
import torch.distributed as dist

from thunder_xform.errors import ParallelError
from thunder_xform.parallel import process_group


def named(option):
    try:
        return dist.get_process_group_ranks(process_group(option, "p"))
    except ParallelError as error:
        return error.problem


def options():
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return {
        "nothing": named(None),
        "world": named(dist.group.WORLD),
        "own": named([dist.new_group([0]), dist.new_group([1])][rank]),
        "line": named(dist.init_device_mesh("cpu", (2,))),
        "replicate": named(mesh["replicate"]),
        "shard": named(mesh["shard"]),
        "plane": named(mesh),
        "flattened": named(mesh._flatten()),
        "text": named("replicate"),
        "other": named([dist.new_group([1]), dist.new_group([0])][rank]),
    }


def test_options(ranks):
    for rank, found in enumerate(ranks.run(options)):
        assert found == {
            "nothing": [0, 1],
            "world": [0, 1],
            "own": [rank],
            "line": [0, 1],
            "replicate": [0, 1],
            "shard": [rank],
            "plane": "Plugin 'p' got a mesh with the dimensions ('replicate', 'shard') and sizes (2, 1).",
            "flattened": [0, 1],
            "text": "Plugin 'p' got str as process_group.",
            "other": f"Rank {rank} is not a member of the process group given to plugin 'p'.",
        }


def test_not_initialized():
    with pytest.raises(ParallelError, match="Start with torchrun"):
        process_group(None, "p")
