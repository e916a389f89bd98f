"""V19 on ranks: what no rank's loss depends on has no gradient; what one rank's does has the mean, on all of them."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import thunder_xform as tx
from thunder_xform.testing.accumulation import accumulate_eager, gradient_errors


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.first, self.second, self.cut = (nn.Linear(4, 4) for _ in range(4))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.shared.weight

    def forward(self, x):
        h = torch.tanh(self.shared(x)) + self.cut(x).detach()
        return h, self.first(h), self.second(x), self.tied(x)


#: which outputs take part in the loss: ``SCHEDULES[name][microbatch][rank]``, the last one synchronizes
SCHEDULES = {
    "same on all ranks": [[(0,), (0,)]],
    "one rank": [[(1,), (0,)]],
    "each rank another": [[(1,), (2,)]],
    "present, then absent": [[(0, 1), (0, 1)], [(0,), (0,)]],
    "absent, then present": [[(0,), (0,)], [(0, 1), (0, 1)]],
    "never": [[(2,), (2,)], [(3,), (3,)]],
    "present once on one rank": [[(0,), (1,)], [(0,), (0,)], [(2,), (2,)]],
    "ranks take turns": [[(0,), (1,)], [(1,), (0,)]],
}


def loss_of(model, batch):
    x, numbers = batch
    return sum(model(x)[number].square().mean() for number in numbers)


def together(model, batches):
    """One ``no_sync`` around all but the last."""
    with model.no_sync():
        for batch in batches[:-1]:
            loss_of(model, batch).backward()
    loss_of(model, batches[-1]).backward()


def inside(model, batches):
    """All in ``no_sync``, then an explicit synchronization."""
    with model.no_sync():
        for batch in batches:
            loss_of(model, batch).backward()
    tx.handle(model).sync_gradients()


def each(model, batches):
    for batch in batches:
        loss_of(model, batch).backward()


def errors(names, options):
    import thunder

    group = None
    if "mesh" in options:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options = {"ddp": {"process_group": mesh["replicate"]}, "fsdp": {"process_group": mesh["shard"]}}
        group = mesh["shard"].get_group()
    torch.manual_seed(0)
    plain = Model()
    model = thunder.jit(copy.deepcopy(plain), transforms=tx.registry.resolve(names, options=options))
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for case, schedule in SCHEDULES.items():
        batches = [[(torch.randn(3, 4), numbers[r % len(numbers)]) for r in range(world)] for numbers in schedule]
        accumulate_eager(plain, loss_of, batches)
        for way in (together, inside, each):
            model.zero_grad()
            way(model, [batch[rank] for batch in batches])
            for name, error in gradient_errors(model, plain, group).items():
                if not error < 1e-6:
                    found[case, way.__name__, name] = error
    # Adam leaves alone what has no gradient.
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, model)]
    for numbers in ((0, 1), (0,), (2,)):
        batches = [[(torch.randn(3, 4), numbers) for _ in range(world)]]
        accumulate_eager(plain, loss_of, batches)
        model.zero_grad()
        loss_of(model, batches[0][rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
    state = tx.handle(model).state_dict()
    for name, tensor in plain.state_dict().items():
        if not torch.allclose(state[name], tensor, atol=1e-5):
            found["adam", name] = (state[name] - tensor).abs().max().item()
    return found


def test_under_ddp(ranks):
    assert ranks.run(errors, ["ddp"], {}) == [{}, {}]


def test_under_fsdp(ranks):
    assert ranks.run(errors, ["fsdp"], {"fsdp": {"zero": 3}}) == [{}, {}]


def test_on_a_hybrid_mesh(four_ranks):
    assert four_ranks.run(errors, ["fsdp", "ddp"], {"mesh": True}) == [{}] * 4
