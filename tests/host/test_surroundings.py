"""What a call reads anew and a trace would read once is refused, with the line (siblings of V02)."""

import itertools
import logging
import os
import random
import time
import types

import numpy
import pytest
import thunder
import torch

import thunder_xform as tx
from thunder_xform.errors import PipelineError

COUNT = itertools.count(1)
log = logging.getLogger(__name__)
DRAW = "Draw with PyTorch's operators, or pass it as an argument."
KEEP = "Keep it in a buffer that forward assigns, return it, or change it outside of forward."


class Net(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.function = function
        self.python = random.Random(0)
        self.numpy = numpy.random.default_rng(0)
        self.count = itertools.count(1)
        self.steps = iter([1.0, 2.0, 3.0])

    def forward(self, x):
        return self.function(self, self.linear(x))


def compiled(function):
    return thunder.jit(Net(function), transforms=tx.registry.resolve([]))


def over_steps(self, x):
    for step in self.steps:
        x = x * step
    return x


@pytest.mark.parametrize(
    ("function", "what", "remedy"),
    [
        (lambda self, x: x if random.random() < 0.5 else x * 2, "reads Python's random numbers", DRAW),
        (lambda self, x: x * random.choice([1.0, 2.0]), "reads Python's random numbers", DRAW),
        (lambda self, x: x * random.uniform(1.0, 2.0), "reads Python's random numbers", DRAW),
        (lambda self, x: x * self.python.random(), "reads Python's random numbers", DRAW),
        (lambda self, x: x * float(numpy.random.rand()), "reads NumPy's random numbers", DRAW),
        (lambda self, x: x * float(self.numpy.normal()), "reads NumPy's random numbers", DRAW),
        (lambda self, x: x * time.time(), "reads time.time()", DRAW),
        (lambda self, x: x * time.perf_counter_ns(), "reads time.perf_counter_ns()", DRAW),
        (lambda self, x: x * next(COUNT), "advances a count that is not its own", KEEP),
        (lambda self, x: x * next(self.count), "advances a count that is not its own", KEEP),
        (over_steps, "advances a list_iterator that is not its own", KEEP),
    ],
)
def test_refused(function, what, remedy):
    model = compiled(function)
    for _ in range(2):
        with pytest.raises(PipelineError) as caught:
            model(torch.randn(2, 4))
        assert caught.value.problem.startswith(
            f"Net {what} while it runs, which compiled code cannot repeat ({__file__}:"
        )
        assert caught.value.remedy == remedy


def test_what_forward_makes_is_its_own():
    def function(self, x):
        numbers = iter([2.0, 3.0])
        total = x * next(numbers)
        for a, b in zip(numbers, (n for n in (1.0, 2.0)), strict=False):
            total = total + x * a * b
        log.warning("once")
        return total * torch.rand(()) if self.training else total

    model = compiled(function).eval()
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), model.linear(x) * 5.0)
    model.train()
    assert not torch.equal(model(x), model(x))


# -- globals ---------------------------------------------------------------------------------------------------------

SCALES = [1.0]
OPTIONS = {"a": 1.0}
CHOSEN = {1.0}
CONSTANTS = types.SimpleNamespace(act=torch.relu, scales=[1.0])
TABLE = numpy.ones(2)


def over_scales(self, x):
    for scale in SCALES:
        x = x * (1 + scale)
    return x


def closing():
    held = [1.0]
    return lambda self, x: x * len(held), held.append


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (lambda self, x: x * len(SCALES), SCALES.append),
        (over_scales, SCALES.append),
        (lambda self, x: x * SCALES[-1], SCALES.append),
        (lambda self, x: x * sum(OPTIONS.values()), lambda v: OPTIONS.update({str(v): v})),
        (lambda self, x: x * 2 if "new" in OPTIONS else x, lambda v: v == 2.0 and OPTIONS.update(new=v)),
        (lambda self, x: x * 2 if 2.0 in CHOSEN else x, CHOSEN.add),
        (lambda self, x: x * float(TABLE[0]), TABLE.fill),
        (lambda self, x: CONSTANTS.act(x), lambda v: setattr(CONSTANTS, "act", [torch.tanh, torch.sin][int(v) % 2])),
        (lambda self, x: x * len(CONSTANTS.scales), CONSTANTS.scales.append),
        (
            lambda self, x: x * float(os.environ.get("XFORM_SCALE", "1")),
            lambda v: os.environ.update(XFORM_SCALE=str(v)),
        ),
        closing(),
    ],
)
def test_what_global_names_lead_to_is_followed(function, change, monkeypatch):
    monkeypatch.setenv("XFORM_SCALE", "1")
    model = compiled(function)
    x = torch.randn(2, 4)
    for value in (None, 2.0, 3.0):
        if value is not None:
            change(value)
        torch.testing.assert_close(model(x), function(model, model.linear(x)))
    misses = thunder.cache_misses(model)
    model(x)
    assert thunder.cache_misses(model) == misses


def test_a_global_that_numpy_changes_is_refused():
    model = compiled(lambda self, x: x * float(numpy.add(TABLE, 1, out=TABLE)[0]))
    with pytest.raises(PipelineError, match="Net changes a ndarray in place while it runs, which compiled code cannot"):
        model(torch.randn(2, 4))
