"""What PyTorch decides from a parameter, it decides from the whole: against eager PyTorch on the data of all ranks."""

import copy
import re

import pytest
import thunder
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import thunder_xform as tx

TOLERANCE = 2e-5


class Net(torch.nn.Module):
    """Rows that two ranks share unevenly, a parameter of one row, a frozen one and tied ones."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.second = torch.nn.Linear(5, 4)
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.randn(4), requires_grad=False)
        self.tied = torch.nn.Linear(4, 5, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).relu() + self.tied(x)) * self.gain + self.frozen


def plain():
    torch.manual_seed(3)
    return Net()


def jit(model, names=("fsdp",), **options):
    return thunder.jit(model, transforms=tx.registry.resolve(list(names), options=options))


def data():
    torch.manual_seed(5)
    return torch.randn(dist.get_world_size(), 6, 4)


def eager_gradients(model, x):
    for part in x:
        (model(part).square().mean() / len(x)).backward()


def step(model, x):
    model(x[dist.get_rank()]).square().mean().backward()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def deviation(model, expected):
    names = dict(expected.named_parameters())
    return max((whole(p.detach()) - names[n]).abs().max().item() for n, p in model.named_parameters())


def forms():
    model, found = jit(plain()), {}
    step(model, data())
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor), name
        assert isinstance(p, torch.nn.Parameter), name
        assert p.placements == (Shard(0),)
        assert p.grad is None or (isinstance(p.grad, DTensor) and p.grad.placements == p.placements)
        found[name] = tuple(p.shape)
    assert model.get_parameter("tied.weight") is model.get_parameter("first.weight")
    assert found == {n: tuple(p.shape) for n, p in plain().named_parameters()}
    seen = []
    hook = model.get_parameter("gain").register_post_accumulate_grad_hook(seen.append)
    step(model, data())
    hook.remove()
    assert [p is model.get_parameter("gain") for p in seen] == [True]
    replicated = jit(plain(), ["ddp"])
    assert not any(isinstance(p, DTensor) for p in replicated.parameters())


def test_parameters_and_gradients_are_dtensors(ranks):
    ranks.run(forms)


def clipped():
    errors, x = {}, data()
    model, expected = jit(plain()), plain()
    eager_gradients(expected, x)
    step(model, x)
    for order in (1.0, 2.0, float("inf")):
        gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, expected)]
        wanted = torch.nn.utils.get_total_norm(gradients[1], order)
        for foreach in (False, True):  # one rank has no rows of `gain`
            norm = torch.nn.utils.get_total_norm(gradients[0], order, foreach=foreach)
            errors[f"norm {order}, foreach={foreach}"] = abs(whole(norm).item() - wanted.item())
        errors[f"handle {order}"] = abs(tx.handle(model).clip_grad_norm_(1e9, order).item() - wanted.item())
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, expected)]
    errors["clip_grad_norm_"] = abs(whole(norms[0]).item() - norms[1].item())
    names = dict(expected.named_parameters())
    for name, p in model.named_parameters():
        if p.grad is not None:
            errors[name] = (whole(p.grad) - names[name].grad).abs().max().item()
    torch.nn.utils.clip_grad_value_(model.parameters(), 2**-10)
    errors["clip_grad_value_"] = max(whole(p.grad).abs().max().item() for p in model.parameters() if p.requires_grad)
    assert errors.pop("clip_grad_value_") <= 2**-10
    return errors


def test_torch_clips_by_the_whole_norm(ranks):
    """V07."""
    for errors in ranks.run(clipped):
        assert max(errors.values()) < TOLERANCE, errors


def scaled(overflow):
    model, expected, x = jit(plain()), plain(), data()
    before = [whole(p.detach()).clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(x[dist.get_rank()]).square().mean()).backward()
    if overflow is not None:
        weight = model.get_parameter("first.weight")
        if dist.get_rank() == overflow:
            weight.grad.to_local()[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    if overflow is None:
        eager_gradients(expected, x)
        torch.optim.SGD(expected.parameters(), lr=0.1).step()
        return scaler.get_scale(), deviation(model, expected)
    after = [whole(p.detach()) for p in model.parameters()]
    return scaler.get_scale(), max((a - b).abs().max().item() for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(("overflow", "scale"), [(None, 8.0), (0, 2.0), (1, 2.0)])
def test_gradient_scaling_hears_of_an_overflow_on_any_rank(ranks, overflow, scale):
    """V06, and 16-mixed loss scaling with shards."""
    for found, error in ranks.run(scaled, overflow):
        assert found == scale
        assert error < TOLERANCE


def optimizers():
    errors = {}
    x = data()

    def lars(parameters):
        for p in parameters:
            if p.grad is not None:
                p.data.add_(p.grad * (whole(p.detach().norm()) / (1e-3 + whole(p.grad.norm()))), alpha=-0.01)

    made = {
        "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
        "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
        "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        "SGD fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
        "SGD foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=True),
        "LARS": None,
    }
    model = jit(plain())
    state = copy.deepcopy(tx.handle(model).state_dict())
    for name, make in made.items():
        tx.handle(model).load_state_dict(state)
        expected = plain()
        pair = [None if make is None else make(list(m.parameters())) for m in (model, expected)]
        for _ in range(3):
            model.zero_grad()
            expected.zero_grad()
            step(model, x)
            eager_gradients(expected, x)
            for m, optimizer in zip((model, expected), pair, strict=True):
                with torch.no_grad():
                    lars(m.parameters()) if optimizer is None else optimizer.step()
        errors[name] = deviation(model, expected)
    penalties = [sum(whole(p.norm()) for p in m.parameters()).item() for m in (model, expected)]
    errors["penalty"] = abs(penalties[0] - penalties[1])
    return errors


def test_optimizers_that_look_at_whole_matrices(ranks):
    """V49."""
    for errors in ranks.run(optimizers):
        assert {k: e for k, e in errors.items() if not e < 1e-4} == {}


def full_states():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    model, expected, x = jit(plain()), plain(), data()
    options = StateDictOptions(full_state_dict=True)
    for found in (get_model_state_dict(model, options=options), {n: whole(t) for n, t in model.state_dict().items()}):
        assert found.keys() == expected.state_dict().keys()
        for name, tensor in expected.state_dict().items():
            assert torch.equal(found[name], tensor), name
    pair = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, expected)]
    step(model, x)
    eager_gradients(expected, x)
    for optimizer in pair:
        optimizer.step()
    found, wanted = (
        get_optimizer_state_dict(m, o, options=options)["state"] for m, o in zip((model, expected), pair, strict=True)
    )
    assert found.keys() == wanted.keys()
    return max(
        (found[name][slot] - value).abs().max().item()
        for name, slots in wanted.items()
        for slot, value in slots.items()
    )


def test_torch_states_are_whole(ranks):
    """V08."""
    assert max(ranks.run(full_states)) < TOLERANCE


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
