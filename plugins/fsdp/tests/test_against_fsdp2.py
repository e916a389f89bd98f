"""Optimizers that look at whole matrices, and states that change world size: as FSDP2 on the same job (V49, V08)."""

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import thunder_xform as tx

KINDS = ("fsdp2", 2, 3)


def plain(bias=False):
    """Five rows for two ranks."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 5, bias=bias), torch.nn.ReLU(), torch.nn.Linear(5, 4, bias=bias))


def distributed(kind, model):
    if kind == "eager":
        return model
    if kind == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return thunder.jit(model, transforms=tx.registry.resolve(["fsdp"], options={"fsdp": {"zero": kind}}))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parameters(model):
    return [whole(p.detach()).clone() for p in model.parameters()]


class Lars(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad * (-0.1 * p.norm() / (p.grad.norm() + 1e-9)))


OPTIMIZERS = {
    "Muon": lambda params: torch.optim.Muon(params, lr=1e-2),
    "LARS": Lars,
    "AdamW and a norm in the loss": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def train(model, optimizer, penalty=False, steps=3):
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(5))
    for _ in range(steps):
        if dist.is_initialized() and dist.get_world_size() == 2:
            loss = model(x[dist.get_rank()]).square().mean()
        else:
            loss = (model(x[0]).square().mean() + model(x[1]).square().mean()) / 2
        if penalty:
            loss = loss + 0.1 * sum(whole(p.norm()) for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(name):
    results = []
    for kind in KINDS:
        model = distributed(kind, plain())
        train(model, OPTIMIZERS[name](model.parameters()), "norm" in name)
        results.append(parameters(model))
    return results


def errors_of_adafactor():
    """DTensor has no placement for what Adafactor does in place, under FSDP2 neither: nothing has changed then."""
    told = []
    for kind in KINDS:
        model = distributed(kind, plain())
        before = parameters(model)
        with pytest.raises(RuntimeError) as caught:
            train(model, torch.optim.Adafactor(model.parameters(), lr=1e-2), steps=1)
        assert all(map(torch.equal, before, parameters(model)))
        told.append(str(caught.value).partition("\n")[0])
    return told


def all_of_them():
    return {name: trained(name) for name in OPTIMIZERS}, errors_of_adafactor(), orders()


def orders():
    """Norms of every order through torch.nn.utils, with FSDP2's, for one gradient and for clipped ones."""
    norms = []
    for kind in KINDS:
        model = distributed(kind, plain(bias=True))
        x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(5))
        model(x[dist.get_rank()]).square().mean().backward()
        found = []
        for order in (0.5, 1.5, 3.0, 2.0, float("inf"), 0.0, -1.0, float("-inf")):
            try:
                found.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, order)).item())
            except Exception as error:
                found.append(type(error).__name__)
        norms.append(found)
    return norms


def test_numbers_of_fsdp2(ranks):
    """V49, and V08's norms of other orders."""
    if not hasattr(torch.optim, "Muon"):
        OPTIMIZERS.pop("Muon", None)
    for results, told, norms in ranks.run(all_of_them):
        for name, (theirs, *ours) in results.items():
            for mine in ours:
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5, msg=lambda t, n=name: f"{n}: {t}")
        assert told[1:] == told[:1] * 2
        assert "placement" in told[0]
        theirs, *ours = norms
        for mine in ours:
            for found, expected in zip(mine, theirs, strict=True):
                assert found == (expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-5)), norms


def saved(folder):
    model = distributed(3, plain())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=2)
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    train(model, optimizer, steps=2)
    return parameters(model)


def resumed(folder, kind):
    model = plain()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model = distributed(kind, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    train(model, optimizer, steps=2)
    return parameters(model)


def resumed_whole(states):
    model = distributed(3, plain())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    train(model, optimizer, steps=2)
    return parameters(model)


def test_states_in_another_world_size(ranks, tmp_path):
    """V08: saved on two ranks, loaded on two, on one, in eager PyTorch and in FSDP2."""
    from thunder_xform.testing import run_ranks

    expected, _ = ranks.run(saved, str(tmp_path))
    again, _ = ranks.run(resumed, str(tmp_path), 3)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    for kind in ("fsdp2", 2):
        torch.testing.assert_close(ranks.run(resumed, str(tmp_path), kind)[0], expected)
    torch.testing.assert_close(run_ranks(resumed, 1, str(tmp_path), 3)[0], expected)
    torch.testing.assert_close(resumed(str(tmp_path), "eager"), expected)


def test_whole_states_from_one_process(ranks):
    """V08: eager PyTorch's, taken over by two ranks."""
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=2)
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found, _ = ranks.run(resumed_whole, states)
    train(model, optimizer, steps=2)
    torch.testing.assert_close(found, parameters(model))
