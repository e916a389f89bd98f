"""U16 and U17: each mode compiles once and is found again."""

from __future__ import annotations

import pytest
import thunder
import torch
from thunder.transforms.prune_prologue_checks import PrunePrologueChecks
from torch import nn

import thunder_xform as tx


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def compile_(model, around=lambda pipeline: pipeline, **options):
    pipeline = tx.registry.resolve(["lora"], options={"lora": {"r": 2, **options}})
    compiled = thunder.jit(model, transforms=around(pipeline))
    for name, parameter in compiled.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return compiled


def eager(compiled, x):
    """The model in eval mode, computed from the compiled model's parameters."""
    p = dict(compiled.named_parameters())
    for layer in ("first", "last"):
        delta = 4 * p[f"{layer}.lora_B.default.weight"] @ p[f"{layer}.lora_A.default.weight"]
        x = nn.functional.linear(x, p[f"{layer}.weight"] + delta, p[f"{layer}.bias"])
        x = torch.relu(x) if layer == "first" else x
    return x


def test_u17_train_and_eval_compile_once_each():
    compiled = compile_(Net(), lora_dropout=0.5)
    x = torch.randn(4, 8)
    for _ in range(50):
        assert not torch.equal(compiled.train()(x), compiled(x))
        torch.testing.assert_close(compiled.eval()(x), eager(compiled, x), atol=1e-5, rtol=1e-5)
    assert thunder.cache_misses(compiled) == 2
    events = tx.handle(compiled).events
    assert [event.number for event in events] == [0, 1]
    chosen = "(False, ('default', 1.0))"
    assert f"guard key of 'lora': ({chosen}, True, True) -> ({chosen}, False, False)" in events[1].reasons


def test_u17_the_mode_of_one_layer_counts():
    model = Net()
    compiled = compile_(model, lora_dropout=0.9).eval()
    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled(x), eager(compiled, x), atol=1e-5, rtol=1e-5)
    model.first.train()
    assert not torch.equal(compiled(x), compiled(x))
    model.first.eval()
    torch.testing.assert_close(compiled(x), eager(compiled, x), atol=1e-5, rtol=1e-5)
    assert thunder.cache_misses(compiled) == 2


@pytest.mark.parametrize("prune_all", [False, True])
@pytest.mark.parametrize("position", ["before", "after"])
def test_u16_eval_after_train_with_pruned_checks(prune_all, position):
    prune = PrunePrologueChecks(prune_all_checks=prune_all)
    compiled = compile_(
        Net(),
        lambda pipeline: [prune, *pipeline] if position == "before" else [*pipeline, prune],
        lora_dropout=0.5,
    )
    x = torch.randn(4, 8)
    for _ in range(2):
        assert not torch.equal(compiled.train()(x), compiled(x))
        torch.testing.assert_close(compiled.eval()(x), eager(compiled, x), atol=1e-5, rtol=1e-5)
    assert thunder.cache_misses(compiled) == 2
