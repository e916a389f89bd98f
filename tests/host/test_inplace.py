"""Buffers that the model updates in place are updated in the compiled model, whatever plugins do to its trace."""

import copy

import pytest
import torch

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.testing import pipeline_of

identity = tx.operator(
    "test_inplace_identity",
    meta=lambda *tensors: tuple(tx.tensor_like(t) for t in tensors),
    fn=lambda *tensors: tensors,
    backward=lambda inputs, outputs, gradients: gradients,
)


class Copied(tx.Plugin):
    """Gives the compiled model its own buffers."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in params.buffers:
            params.replace(name, params.tensor(name).clone())


class Restored(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        return computation.restore([(computation.differentiable_parameters, identity)])


class Doubled(tx.Plugin):
    """Replaces the operators that compute what is written in place."""

    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        return computation.rewrite("add", lambda op, edit: op.call(op.args[0], op.args[1] * 2))


class Frozen(tx.Plugin):
    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in list(params):
            params.set_requires_grad(name, name.endswith("weight"))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return self.norm(self.linear(x)).sigmoid() * self.calls


PIPELINES = {
    "nothing": lambda: pipeline_of(copied=Copied(None)),
    "restore": lambda: pipeline_of(copied=Copied(None), restored=Restored(None)),
    "restore twice": lambda: pipeline_of(restored=Restored(None), copied=Copied(None), again=Restored(None)),
    "freeze": lambda: pipeline_of(copied=Copied(None), frozen=Frozen(None), restored=Restored(None)),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_buffers_are_updated_in_place(make, backward):
    torch.manual_seed(0)
    module = Model()
    plain = copy.deepcopy(module)
    model = thunder.jit(module, transforms=make())
    for _ in range(3):
        x = torch.randn(8, 4)
        out, expected = model(x), plain(x)
        torch.testing.assert_close(out, expected)
        if backward:
            out.square().mean().backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, msg=lambda text, name=name: f"{name}: {text}")


def test_a_rewritten_update_takes_effect():
    plain = Model()
    model = thunder.jit(copy.deepcopy(plain), transforms=pipeline_of(copied=Copied(None), doubled=Doubled(None)))
    x = torch.randn(8, 4)
    for _ in range(2):
        model(x).sum().backward()
    assert model.get_buffer("calls").item() == 4
    assert model.get_buffer("norm.num_batches_tracked").item() == 4
