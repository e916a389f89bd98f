"""Checkpoints: full ones of the plain model, sharded ones for any number of ranks, optimizers."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import thunder_xform as tx
from thunder_xform.testing import RankPool
from thunder_xform.testing.accumulation import own_rows


class Net(torch.nn.Module):
    """Uneven sizes, fewer rows than ranks, a scalar, a tied pair, a frozen parameter, a buffer, a transient one."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.gain = torch.nn.Parameter(torch.tensor(0.9))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(2))
        self.blocks[1].weight.requires_grad_(False)
        self.short = torch.nn.Linear(5, 3)
        self.wide = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(5))
        self.register_buffer("cache", torch.randn(5), persistent=False)

    def forward(self, tokens):
        f = torch.nn.functional
        x = f.embedding(tokens, self.embedding.weight) * self.gain + self.shift + self.cache
        for block in self.blocks:
            x = torch.tanh(f.linear(x, block.weight, block.bias))
        return f.linear(f.linear(x, self.short.weight, self.short.bias) @ self.wide.float(), self.head.weight)


def made(seed):
    torch.manual_seed(seed)
    return Net()


def jit(model, **options):
    import thunder

    return thunder.jit(model, transforms=tx.registry.resolve(["fsdp"], options={"fsdp": options}))


def loss_of(model, tokens):
    return model(tokens).square().mean()


def train(model, optimizer, steps, ranks=True):
    """All ranks of all numbers of ranks see the same data, so that every run is the same one."""
    tokens = torch.arange(12).view(3, 4) % 7
    losses = []
    for _ in range(steps):
        loss = loss_of(model, tokens)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def eager(steps):
    model = made(1)
    return train(model, adamw(model), steps), model


def same(state, expected):
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert state[name].shape == tensor.shape, name
        torch.testing.assert_close(
            state[name], tensor, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


# -- full ------------------------------------------------------------------------------------------------------------


def full():
    model = jit(made(1 + dist.get_rank()))
    before = {name: tensor.clone() for name, tensor in tx.handle(model).state_dict().items()}
    same(before, made(1).state_dict())
    train(model, adamw(model), 3)
    plain = made(5)
    plain.load_state_dict(tx.handle(model).state_dict(), strict=True)
    same(plain.state_dict(), eager(3)[1].state_dict())
    tx.handle(model).load_state_dict(before)
    same(tx.handle(model).state_dict(), made(1).state_dict())
    for name, parameter in tx.handle(model).parameters.items():
        assert torch.equal(parameter.to_local(), own_rows(before[name])), name


def test_full_state_is_that_of_the_plain_model(ranks):
    """U15: keys, shapes and order of the plain model, root-level and tied ones included; and back."""
    ranks.run(full)


# -- sharded ---------------------------------------------------------------------------------------------------------


def state_of(model, optimizer):
    """Everything that training needs, by name, as DTensors."""
    handle = tx.handle(model)
    names = {id(p): name for name, p in handle.parameters.items()}
    slots = {
        f"{names[id(p)]}.{slot}": handle.distributed(names[id(p)], value) if value.dim() else value
        for p, values in optimizer.state.items()
        for slot, value in values.items()
    }
    return {"model": handle.state_dict("sharded"), "optimizer": slots}


def save(path):
    model = jit(made(1 + dist.get_rank()))
    optimizer = adamw(model)
    first = train(model, optimizer, 2)
    dcp.save(state_of(model, optimizer), checkpoint_id=path)
    return first, train(model, optimizer, 2)


def resume(path):
    model = jit(made(10 + dist.get_rank()))
    model.get_buffer("cache").copy_(made(1).cache)
    optimizer = adamw(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    tx.handle(model).load_state_dict(state["model"], "sharded")
    return train(model, optimizer, 2)


def resume_plain(path):
    """Any program reads it into plain tensors."""
    plain = made(3)
    state = {"model": {name: t for name, t in plain.state_dict().items() if name not in ("head.weight", "gain")}}
    dcp.load(state, checkpoint_id=path)
    return state["model"]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sharded_state_moves_to_other_numbers_of_ranks(ranks, four_ranks, tmp_path, world):
    """U15: model and optimizer, saved by two ranks, continue on one, two and four as if nothing had happened."""
    expected, _ = eager(4)
    for first, second in ranks.run(save, tmp_path / "saved"):
        assert first + second == pytest.approx(expected, abs=1e-6)
    if world == 1:
        with RankPool(1) as one:
            found = one.run(resume, tmp_path / "saved")
            plain = one.run(resume_plain, tmp_path / "saved")[0]
        after = eager(2)[1].state_dict()
        same(plain, {name: t for name, t in after.items() if name in plain})
    else:
        found = {2: ranks, 4: four_ranks}[world].run(resume, tmp_path / "saved")
    for losses in found:
        assert losses == pytest.approx(expected[2:], abs=1e-6)


def sharded_forms():
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    model = jit(made(1))
    handle = tx.handle(model)
    state = handle.state_dict("sharded")
    for name, parameter in handle.parameters.items():
        assert isinstance(state[name], DTensor)
        assert state[name].to_local().data_ptr() == parameter.to_local().data_ptr(), "a copy"
    for name, tensor in made(1).named_parameters():
        if tensor.dim():
            expected = distribute_tensor(tensor.detach(), state[name].device_mesh, [Shard(0)])
            assert state[name].shape == expected.shape
            assert state[name].stride() == expected.stride()
            assert torch.equal(state[name].to_local(), expected.to_local())
    assert torch.equal(state["gain"].full_tensor(), made(1).gain.detach().reshape(1))
    assert type(state["shift"]) is torch.Tensor
    # whole tensors are cut
    handle.load_state_dict(dict(made(2).named_parameters()) | {"shift": state["shift"]}, "sharded")
    same(handle.state_dict(), made(2).state_dict() | {"shift": made(1).shift})
    # what is distributed otherwise is refused, and nothing is half-loaded
    other = distribute_tensor(torch.zeros(5, 5), state["wide"].device_mesh, [Replicate()])
    with pytest.raises(tx.errors.CheckpointError, match=r"blocks\.0\.weight.*Replicate"):
        handle.load_state_dict(handle.state_dict("sharded") | {"blocks.0.weight": other}, "sharded")
    same(handle.state_dict(), made(2).state_dict() | {"shift": made(1).shift})


def test_sharded_state_is_in_dtensors(ranks):
    ranks.run(sharded_forms)


def one_bad_rank():
    model = jit(made(1))
    state = tx.handle(model).state_dict()
    if dist.get_rank() == 1:
        state["wide"] = torch.zeros(2)
    try:
        tx.handle(model).load_state_dict(state)
    except tx.errors.XformError as error:
        return type(error).__name__, str(error)


def test_a_bad_state_on_one_rank_is_an_error_on_all(ranks):
    (kind_0, text_0), (kind_1, text_1) = ranks.run(one_bad_rank)
    assert (kind_0, kind_1) == ("ParallelError", "CheckpointError")
    assert "'wide'" in text_0
    assert "'wide'" in text_1


def whole_optimizer():
    model = jit(made(1 + dist.get_rank()))
    optimizer = adamw(model)
    tx.handle(model).adopt(optimizer)
    train(model, optimizer, 2)
    return optimizer.state_dict()


def test_optimizer_state_in_whole_tensors_loads_in_the_plain_model(ranks):
    plain = made(1)
    reference = adamw(plain)
    train(plain, reference, 2)
    expected = reference.state_dict()["state"]
    for state in ranks.run(whole_optimizer):
        assert state["state"].keys() == expected.keys()
        for number, slots in expected.items():
            for slot, value in slots.items():
                torch.testing.assert_close(state["state"][number][slot], value, atol=1e-6, rtol=1e-5)
