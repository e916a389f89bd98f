"""What a call reads anew and a trace would read once is refused, with the line (siblings of V02)."""

import itertools
import logging
import random
import time

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
