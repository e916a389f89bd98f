"""check="eager": each newly compiled entry is compared with eager PyTorch, and what departs is named."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch
from torch import nn

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.testing import pipeline_of

_dropping = tx.operator(
    "check_dropping",
    meta=lambda x: tx.tensor_like(x),
    fn=lambda x: x.clone(),
    backward=lambda inputs, outputs, gradients: (None,),
)
_halving = tx.operator(
    "check_halving",
    meta=lambda x: tx.tensor_like(x),
    fn=lambda x: x.clone(),
    backward=lambda inputs, outputs, gradients: (tx.ops.mul(gradients[0], 0.5),),
)
FAULTS = {
    "scaled": lambda y: tx.ops.mul(y, 1.01),
    "dropped": _dropping,
    "halved": _halving,
    "none": lambda y: y,
    "drawing": lambda y: tx.ops.dropout(y, 1e-9),
}


class Planted(tx.Plugin):
    """Does to the outputs of `middle` what its option says."""

    @tx.hookimpl
    def before_autograd(self, computation):
        return computation.rewrite(
            lambda o: o.name == "linear" and o.linear_weight == "middle.weight",
            lambda o, edit: FAULTS[self.options](o.call()),
        )


class Net(nn.Module):
    """Dropout, running statistics, tied and frozen and unused parameters; nested, integer and plain outputs."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.middle = nn.Linear(6, 6)
        self.middle.bias.requires_grad_(False)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.words.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens, scale=None, note="text"):
        x = self.drop(torch.tanh(self.middle(self.norm(self.words(tokens)))))
        x = x if scale is None else x * scale
        return {"logits": self.head(x), "next": (tokens + 1, note)}


def jitted(plain, *faults):
    plugins = {f"plugin{i}": Planted(fault) for i, fault in enumerate(faults)}
    return thunder.jit(plain, transforms=pipeline_of(**plugins).check())


def tokens(count=5):
    return torch.arange(count) * 3 % 7


def test_a_right_model_passes_once_an_entry_and_nothing_changes():
    torch.manual_seed(0)
    plain = Net()
    model = jitted(plain, "none")
    counted = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
            parameter.register_hook(lambda g: counted.append(1))
            parameter.register_post_accumulate_grad_hook(lambda p: counted.append(1))
    scale = torch.ones(5, 6, requires_grad=True)
    torch.manual_seed(1)
    found = model(tokens(), scale)["logits"]
    assert (scale.grad, counted) == (None, [])
    assert all(p.grad is None or torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert int(plain.norm.num_batches_tracked) == 1
    # The same as without a check.
    torch.manual_seed(0)
    unchecked = thunder.jit(Net(), transforms=pipeline_of(plugin0=Planted("none")))
    torch.manual_seed(1)
    expected = unchecked(tokens(), scale)["logits"]
    assert torch.equal(found, expected)
    torch.testing.assert_close(dict(model.named_buffers()), dict(unchecked.named_buffers()), rtol=0, atol=0)
    model(tokens(), scale)
    model.eval()
    with torch.no_grad():
        model(tokens())
    reports = [event.check for event in tx.handle(model).events]
    told = "equals eager PyTorch within 0.0001 (outputs: 3, buffers: 3, gradients of inputs: {}, of parameters: 7)"
    assert reports == [told.format(1), told.format(0)]
    assert f"\n  {reports[0]}\n" in tx.handle(model).explain()


@pytest.mark.parametrize(
    ("faults", "told", "fields"),
    [
        (
            ["scaled", "none"],
            (
                r"The compiled model departs from eager PyTorch: output 0 differs by up to [\d.]+ \(allowed [\d.]+\), "
                r"first after 'linear' in 'middle' \(test_check.py:LINE\). Without plugin 'plugin0' "
                r"\[thunder-xform-plugin0\] it does not; leave that out, and report it."
            ),
            {"kind": "output", "name": "0", "plugin": "plugin0"},
        ),
        (
            ["none", "dropped"],
            (
                r"The compiled model departs from eager PyTorch: gradient of 'middle.weight' is missing. Without "
                r"plugin 'plugin1' \[thunder-xform-plugin1\] it does not; leave that out, and report it."
            ),
            {"kind": "gradient", "name": "middle.weight", "plugin": "plugin1", "operator": ""},
        ),
        (["halved"], ".*: gradient of 'middle.weight' differs by up to .*", {"kind": "gradient", "plugin": "plugin0"}),
        (
            ["scaled", "scaled"],
            ".* It does whichever plugin is left out; resolve them one by one.",
            {"kind": "output", "plugin": ""},
        ),
    ],
)
def test_planted_faults_are_found_and_blamed(faults, told, fields):
    torch.manual_seed(0)
    plain = Net()
    model = jitted(plain, *faults)
    state = torch.get_rng_state()
    with pytest.raises(tx.errors.CheckError) as caught:
        model(tokens())
    line = inspect.getsourcelines(Net.forward)[1] + 1
    assert re.fullmatch(told.replace("LINE", str(line)), str(caught.value)), str(caught.value)
    assert {name: caught.value.fields[name] for name in fields} == fields
    assert torch.equal(torch.get_rng_state(), state)
    assert int(plain.norm.num_batches_tracked) == 0
    assert all(p.grad is None for p in model.parameters())
    # It is not forgotten: the next call raises, too.
    with pytest.raises(tx.errors.CheckError):
        model(tokens())


def test_low_precision_has_its_own_tolerance():
    torch.manual_seed(0)
    model = jitted(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16(), "none")
    model(torch.randn(4, 16, dtype=torch.bfloat16))
    assert tx.handle(model).events[0].check.startswith("equals eager PyTorch within 0.05 (outputs: 1")


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def test_random_numbers_are_the_same_or_it_is_said():
    attention = jitted(Attention(), "none")
    attention(torch.randn(1, 1, 4, 4))
    assert tx.handle(attention).events[0].check.startswith("equals eager PyTorch within 0.0001 (outputs: 1")
    model = jitted(Net(), "drawing")
    reason = "random numbers are drawn in another number than in eager PyTorch"
    with pytest.warns(UserWarning, match=f"^A compiled entry was not compared with eager PyTorch: {reason}.$"):
        model(tokens())
    assert tx.handle(model).events[0].check == f"not compared: {reason}"


def test_what_cannot_be_compared_is_said():
    inner = jitted(nn.Linear(2, 2), "none")
    outer = thunder.jit(lambda x: inner(x).sum())
    with pytest.warns(UserWarning, match="compared with eager PyTorch: it was compiled into a function that contains"):
        outer(torch.ones(2))


def test_the_switch():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert tx.registry.resolve([], check=None).names == ("bare",)
    with pytest.raises(tx.errors.PipelineError, match=r"There is no check against 'lazy'. Use check='eager'."):
        pipeline_of(plugin=Planted("none")).check("lazy")
    pipeline = pipeline_of(plugin=Planted("none"))
    thunder.jit(nn.Linear(2, 2), transforms=pipeline)
    with pytest.raises(tx.errors.PipelineError, match=r"is to be checked from its first call on."):
        pipeline.check()
