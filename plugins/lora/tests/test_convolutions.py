"""Convolutions, and transformers' Conv1D: outputs, gradients, training steps, files and merged weights equal PEFT's."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from peft import PeftModel
from torch import nn

import thunder_xform as tx
from thunder_xform_lora import load_peft, peft_options, save_peft


class Net(nn.Module):
    """Strides, paddings, kernels of even, odd and unit size, in one to three dimensions."""

    def __init__(self):
        super().__init__()
        self.solid = nn.Conv3d(2, 4, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.strided = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.pointwise = nn.Conv2d(6, 5, 1)
        self.even = nn.Conv2d(5, 4, (2, 4), padding="same", bias=False)
        self.line = nn.Conv1d(4, 3, 3, stride=3, padding="valid")

    def forward(self, x):
        x = torch.tanh(self.solid(x)).flatten(1, 2)
        x = torch.tanh(self.pointwise(torch.tanh(self.strided(x))))
        return self.line(self.even(x).flatten(2))


@pytest.mark.parametrize(
    "options",
    [
        {"r": 2, "lora_alpha": 5, "rank_pattern": {"strided": 6}, "bias": "lora_only"},
        {"r": 3, "use_dora": True, "use_rslora": True},
    ],
    ids=["plain", "dora"],
)
def test_like_peft(assert_like_peft, options):
    targets = [name for name, _ in Net().named_children()]
    assert_like_peft(Net(), torch.randn(2, 2, 2, 8, 8), target_modules=targets, **options)


@pytest.mark.parametrize("dora", [False, True])
def test_transposed_linear_layers(assert_like_peft, dora):
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(6, 4), nn.Tanh(), nn.Linear(6, 6), Conv1D(5, 6))
    with torch.no_grad():
        model[0].bias.normal_()
    compiled = assert_like_peft(model, torch.randn(2, 3, 4), r=2, target_modules=["0", "2", "3"], use_dora=dora)
    assert dict(compiled.named_parameters())["0.lora_A.default.weight"].shape == (2, 4)
    pipeline = tx.registry.resolve("lora(r=2)")
    thunder.jit(model, transforms=pipeline)
    assert pipeline.plugin("lora").modules == ("0", "2", "3"), "all-linear means them, as in PEFT"


def test_dropout_and_unbatched_inputs(jit):
    """With DoRA, dropout (of a probability that drops nothing) takes another path to the same."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1)), torch.randn(2, 3, 7, 7)
    compiled = jit(model, r=2, target_modules=["0"], use_dora=True, lora_dropout=1e-12)
    plain = copy.deepcopy(model)
    plain.load_state_dict(tx.handle(compiled).state_dict())
    for mode in (True, False):
        torch.testing.assert_close(compiled.train(mode)(x), plain(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(compiled(x[0]), plain(x[0]), atol=1e-5, rtol=1e-5)


def test_groups(jit, peft_of, backward_both, tmp_path):
    model, x = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2)), torch.randn(2, 4, 5, 5)
    options = {"r": 4, "target_modules": ["0"]}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)
    ours = backward_both(compiled, reference, x, torch.mean, atol=1e-6, rtol=0)
    handle = tx.handle(compiled)
    with pytest.raises(tx.errors.PipelineError, match="'0' cannot be merged: its adapter connects channels"):
        handle.plugin("lora").merge()
    with pytest.raises(tx.errors.CheckpointError, match="'0' is no plain layer: its adapter connects channels"):
        handle.state_dict()
    save_peft(handle, tmp_path)
    torch.testing.assert_close(PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)(x), ours, atol=1e-6, rtol=0)
    again = thunder.jit(model, transforms=tx.registry.resolve(["lora"], options={"lora": peft_options(tmp_path)}))
    load_peft(tx.handle(again), tmp_path)
    torch.testing.assert_close(again(x), ours, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("settings", "options", "problem"),
    [
        ({"dilation": 2}, {}, r"'0' has dilation=\(2, 2\), which PEFT's adapters cannot follow"),
        ({"padding_mode": "circular"}, {}, "'0' has padding_mode='circular', which PEFT's"),
        ({"groups": 4}, {"r": 6}, "'0' has 4 groups, but `r` is 6, which these do not divide"),
        ({"groups": 2}, {"use_dora": True}, "'0' has 2 groups, and `use_dora` goes with one"),
    ],
)
def test_what_peft_cannot_is_refused(settings, options, problem):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, **settings))
    options = {"r": 2, "target_modules": ["0"], **options}
    with pytest.raises(tx.errors.OptionError, match=problem):
        thunder.jit(model, transforms=tx.registry.resolve(["lora"], options={"lora": options}))
