"""What a launcher would have told a rank."""

from __future__ import annotations

import torch.distributed as dist


def torchrun_environment() -> dict[str, str]:
    """Environment variables of this rank as torchrun sets them on one machine, for trainers that read them.

    The process group exists already, as in a :class:`~thunder_xform.testing.RankPool`; nothing connects to the address.

    >>> os.environ.update(torchrun_environment())
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
        "TORCHELASTIC_RUN_ID": "test",
    }
