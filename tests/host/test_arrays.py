"""Arrays that a model holds, and objects whose attributes are set by no Python code (siblings of V01 and V02)."""

import types

import numpy
import pytest
import thunder
import torch

import thunder_xform as tx
from thunder_xform.errors import PipelineError


class Net(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.function = function
        self.table = numpy.ones(3)
        self.bytes = bytearray(3)
        self.state = types.SimpleNamespace(n=1)

    def forward(self, x):
        return self.function(self, self.linear(x))


def compiled(function):
    return thunder.jit(Net(function), transforms=tx.registry.resolve([]))


def add_out(self, x):
    numpy.add(self.table, 1, out=self.table)
    return x * float(self.table[0])


def add(self, x):
    self.table += 1
    return x


def set_item(self, x):
    self.table[0] += 1
    return x


def set_byte(self, x):
    self.bytes[0] = 1
    return x


def set_namespace(self, x):
    self.state.n += 1
    return x


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (add, "'table', a ndarray, while it runs"),
        (set_item, "'table', a ndarray, while it runs"),
        (set_byte, "'bytes', a bytearray, while it runs"),
        (set_namespace, "'state', a SimpleNamespace, while it runs"),
        (add_out, "table in place while it runs"),
    ],
)
def test_a_forward_that_changes_one_is_refused(function, what):
    model = compiled(function)
    before = model._model.table.copy()
    with pytest.raises(PipelineError) as caught:
        model(torch.randn(2, 4))
    assert caught.value.problem.startswith(f"Net changes {what}, which compiled code cannot repeat")
    if function is not add_out:  # NumPy's own functions are not seen into
        assert numpy.array_equal(model._model.table, before)
        assert model._model.state.n == 1


def test_changes_from_outside_are_followed():
    model = compiled(lambda self, x: x * float(self.table[1]) + self.bytes[2] + self.state.n)
    x, plain = torch.randn(2, 4), model._model
    for step in range(3):
        plain.table[1], plain.bytes[2], plain.state.n = step + 0.5, step, -step
        torch.testing.assert_close(model(x), plain.linear(x) * (step + 0.5))


def test_arrays_of_forward_are_its_own():
    def function(self, x):
        mine = self.table * 2
        mine[0] = 5
        mine += 1
        return x * float(mine[0])

    model = compiled(function)
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), model._model.linear(x) * 6)
