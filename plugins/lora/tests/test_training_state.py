"""U08: what trains, and that the user's module stays as it was."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.testing import pipeline_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)) * self.scale + self.frozen)


def test_u08_adapters_train_and_nothing_else(jit):
    model = Net()
    compiled = jit(model, r=2)
    trainable = {name for name, p in compiled.named_parameters() if p.requires_grad}
    assert trainable == {f"{layer}.lora_{x}.default.weight" for layer in ("first", "last") for x in "AB"}
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"frozen"}
    compiled(torch.randn(5, 4)).sum().backward()
    assert all((p.grad is not None) == (name in trainable) for name, p in compiled.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_u08_the_users_module_stays_bitwise_what_it_was(jit):
    model = Net()
    objects = dict(model.named_parameters())
    before = copy.deepcopy(dict(model.named_parameters()))
    compiled = jit(model, r=2).eval()
    optimizer = torch.optim.SGD([p for p in compiled.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        compiled(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, parameter in after.items():
        assert parameter is objects[name]
        assert parameter.requires_grad == before[name].requires_grad
        assert torch.equal(parameter, before[name])


def test_u08_base_parameters_can_be_unfrozen_in_the_compiled_model(jit):
    model = Net()
    compiled = jit(model, r=2).eval()
    x = torch.randn(5, 4)
    compiled(x)
    bias = dict(compiled.named_parameters())["last.bias"]
    bias.requires_grad_(True)
    compiled(x).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((3,), 5.0))
    assert model.last.bias.grad is None


def test_same_outputs_without_gradients(jit):
    compiled = jit(Net(), r=2).eval()
    x = torch.randn(5, 4)
    with torch.no_grad():
        without = compiled(x)
    torch.testing.assert_close(without, compiled(x), atol=0, rtol=0)


EFFECTS = ("params.set", "params.data", "params.requires_grad", "trace.compute")


def test_declared_effects():
    (step,) = tx.registry.plan("lora").steps
    assert sorted(step.manifest.effects.writes) == sorted(EFFECTS)


@pytest.mark.parametrize("effect", EFFECTS)
def test_no_declared_effect_is_too_much(effect):
    """The verifier objects where any one of them is left out."""
    plugin = tx.registry.resolve("lora(r=2, init_lora_weights='pissa')").plugin("lora")
    pipeline = pipeline_of(lora=plugin, _writes=[other for other in EFFECTS if other != effect])
    with pytest.raises(tx.errors.VerificationError, match=f"is the effect '{effect}[.']"):
        thunder.jit(Net(), transforms=pipeline)(torch.randn(5, 4))
