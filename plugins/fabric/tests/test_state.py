"""Checkpoints of Fabric: full ones load in a plain model, sharded ones in another number of ranks (U15)."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from thunder_xform.testing import RankPool, torchrun_environment


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 7)
        self.down = torch.nn.Linear(7, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.linspace(-1, 1, 3))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale + self.offset


def made(seed=3):
    torch.manual_seed(seed)
    return Net()


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def fabric_with(kind, **kwargs):
    from lightning.fabric import Fabric

    import thunder_xform_fabric

    os.environ.update(torchrun_environment())
    strategies = {"ddp": thunder_xform_fabric.ThunderDDPStrategy, "fsdp": thunder_xform_fabric.ThunderFSDPStrategy}
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategies[kind](**kwargs))
    fabric.launch()
    return fabric


def steps(fabric, model, optimizer, count):
    """Every rank sees the same data, so that the number of ranks does not matter; returns the losses."""
    torch.manual_seed(11)
    losses = []
    for _ in range(count):
        x, y = torch.randn(5, 4), torch.randn(5, 3)
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(kind, type_, path, model_options=None):
    fabric = fabric_with(kind, state_dict_type=type_, **(model_options or {}))
    model = fabric.setup(made())
    optimizer = fabric.setup_optimizers(optimizer_of(p for p in model.parameters() if p.requires_grad))
    steps(fabric, model, optimizer, 2)
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 7})
    return steps(fabric, model, optimizer, 2)


def resume(kind, type_, path, model_options=None):
    fabric = fabric_with(kind, state_dict_type=type_, **(model_options or {}))
    model = fabric.setup(made(seed=100))
    optimizer = fabric.setup_optimizers(optimizer_of(p for p in model.parameters() if p.requires_grad))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    remainder = fabric.load(path, state, weights_only=True)
    return steps(fabric, model, optimizer, 2), state["epoch"], remainder


@pytest.fixture(scope="module")
def one():
    with RankPool(1) as pool:
        yield pool


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_full_checkpoint_loads_in_the_plain_model_and_back(ranks, one, kind, tmp_path):
    path = tmp_path / "full.ckpt"
    continued = ranks.run(save, kind, "full", path)[0]
    checkpoint = torch.load(path, weights_only=True)
    model = made(seed=100)
    model.load_state_dict(checkpoint["model"])
    optimizer = optimizer_of(model.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])

    class Plain:
        def backward(self, loss):
            loss.backward()

    assert steps(Plain(), model, optimizer, 2) == pytest.approx(continued, abs=1e-6)
    for losses, epoch, remainder in (*ranks.run(resume, kind, "full", path), *one.run(resume, "fsdp", "full", path)):
        assert losses == pytest.approx(continued, abs=1e-6)
        assert (epoch, remainder) == (7, {})


@pytest.mark.parametrize(
    ("kind", "options"), [("ddp", {}), ("fsdp", {}), ("fsdp", {"transforms": ["lora"], "options": {"lora": {"r": 2}}})]
)
def test_sharded_checkpoint_loads_in_another_world_size(ranks, one, kind, options, tmp_path):
    path = tmp_path / "sharded"
    continued = ranks.run(save, kind, "sharded", path, options)[0]
    results = [*one.run(resume, "fsdp", "sharded", path, options), *ranks.run(resume, "fsdp", "sharded", path, options)]
    for losses, epoch, remainder in results:
        assert losses == pytest.approx(continued, abs=1e-6)
        assert (epoch, remainder) == (7, {})
    back = one.run(save, kind, "sharded", path, options)[0]
    for losses, *_ in ranks.run(resume, kind, "sharded", path, options):
        assert losses == pytest.approx(back, abs=1e-6)


def load_wrong(path):
    import thunder_xform as tx

    fabric = fabric_with("fsdp", state_dict_type="sharded")
    model = fabric.setup(made())
    fabric.save(path, {"model": model})
    other = fabric.setup(torch.nn.Sequential(made(), torch.nn.Linear(3, 3)))
    kept = {name: p.clone() for name, p in other.named_parameters()}
    messages = []
    for state in ({"model": other}, {"epoch": 1}, {"model": model, "epoch": 1}):
        try:
            fabric.load(path, state)
        except (tx.errors.CheckpointError, KeyError) as error:
            messages.append(str(error))
    assert all(torch.equal(p, kept[name]) for name, p in other.named_parameters())
    return messages


def test_what_does_not_fit_is_refused_before_anything_changes(ranks, tmp_path):
    for lacks, no_model, no_epoch in ranks.run(load_wrong, tmp_path / "sharded"):
        assert "lacks 'model.0.scale' and" in lacks
        assert "one transformed model, but the state has 0" in no_model
        assert "epoch" in no_epoch


def load_raw(path):
    fabric = fabric_with("fsdp")
    model = fabric.setup(made(seed=100))
    fabric.load_raw(path, model)
    return fabric.strategy.get_module_state_dict(model._forward_module)


def test_raw_state_dict_of_the_plain_model(ranks, tmp_path):
    expected = made().state_dict()
    torch.save(expected, tmp_path / "raw.pt")
    for found in ranks.run(load_raw, tmp_path / "raw.pt"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_modules_can_be_made_after_models_are_gone():
    """Hooks on the registration of modules outlive neither their model nor an iteration over them."""
    from thunder_xform_fabric import _module

    for _ in range(3):
        _module._stand_in(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert len(_module._spent) >= 3
    plain, transformed, wrapper = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Module()
    _module._stand_in(plain, transformed)
    assert not _module._spent
    wrapper._original_module = plain
    assert wrapper._original_module is transformed
