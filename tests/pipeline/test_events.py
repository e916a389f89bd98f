"""Compile events: why code was compiled, in the user's terms."""

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.host.events import CompileEvent, reasons
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.0)
        self.kind = "plain"

    def forward(self, x, power=1, *, flip=False):
        y = self.dropout(self.layer(x)) ** power
        return -y if flip or self.kind == "odd" else y


class Count(tx.Plugin):
    level = 0

    @tx.hookimpl
    def guard_key(self):
        return self.level

    @tx.hookimpl
    def invalidate_cache(self, event):
        self.event = event


def test_each_recompilation_says_what_differs_from_the_nearest_code():
    count, model = Count(None), Model()
    compiled = thunder.jit(model, transforms=pipeline_of(count=count))
    x = torch.randn(2, 3)

    def why():
        return tx.handle(compiled).events[-1].reasons

    compiled(x)
    assert why() == ("first call",)
    compiled(torch.randn(4, 3))
    assert why() == ("input x: (2, 3) torch.float32 on cpu -> (4, 3) torch.float32 on cpu",)
    compiled(x, 2)
    assert why() == ("number of args: 1 -> 2",)
    compiled(x, 3)
    assert why() == ("args[1]: 2 -> 3",)
    compiled(x, flip=True)
    assert why() == ("number of kwargs: 0 -> 1",)
    model.dropout.p = 0.25
    compiled(x)
    assert why() == ("module dropout.p: 0.0 -> 0.25",)
    model.dropout.p = 0.0
    model.kind = "odd"
    compiled(x)
    assert why() == ("module kind: 'plain' -> 'odd'",)
    model.kind = "plain"
    model.layer.bias.requires_grad_(False)
    compiled(x)
    assert why() == ("parameter layer.bias: (3,) torch.float32 on cpu that requires grad -> (3,) torch.float32 on cpu",)
    with torch.no_grad():
        compiled(x)
    assert why() == ("is_grad_enabled: True -> False",)
    count.level = 5
    compiled(x)
    assert why() == ("guard key of 'count': 0 -> 5",)
    compiled.eval()
    compiled(x)
    assert why() == ("guard key of 'training': (True, True) -> (False, False)",)
    before = len(tx.handle(compiled).events)
    assert before == thunder.cache_misses(compiled) == 11
    compiled(x)
    assert len(tx.handle(compiled).events) == before
    assert [event.number for event in tx.handle(compiled).events] == list(range(before))


def test_invalidation_is_the_reason_for_what_is_compiled_next_and_old_code_no_longer_counts():
    count = Count(None)
    compiled = thunder.jit(nn.Linear(3, 3), transforms=pipeline_of(count=count))
    x = torch.randn(2, 3)
    compiled(x)
    count.level = 1
    compiled(x)
    handle = tx.handle(compiled)
    assert handle.compiled_entries == 2
    assert handle.invalidate("weights were merged") == 2
    assert count.event == "weights were merged"
    assert handle.compiled_entries == 0
    compiled(x)
    assert handle.events[-1].reasons == ("invalidated: weights were merged",)
    count.level = 0
    compiled(x)
    assert handle.events[-1].reasons == ("guard key of 'count': 1 -> 0",)
    assert "compilation 2: invalidated: weights were merged" in handle.explain()


@pytest.mark.parametrize(
    ("key", "conditions", "expected"),
    [
        ({"a": 1, "b": 2}, {}, ("guard key of 'b': 1 -> 2",)),
        ({"a": 3, "b": 1}, {}, ("guard key of 'a': 2 -> 3",)),
        ({"a": 2, "b": 1}, {"x": "1"}, ("x: now checked",)),
        ({"a": 2, "b": 1}, {}, ("compiled code was dropped, or inputs are not cached",)),
    ],
)
def test_the_nearest_code_is_the_one_that_differs_least(key, conditions, expected):
    held = [CompileEvent(0, (), {"a": 1, "b": 1}), CompileEvent(1, (), {"a": 2, "b": 1})]
    assert reasons(key, conditions, held) == expected
