"""V24: a compiled backward is not recorded; asking for that is an error, and everything else goes on."""

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import PipelineError
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip

TEXT = (
    "The backward of a compiled model is run with create_graph=True, but it cannot be differentiated again. "
    "Compute the gradient penalty with the plain model, or leave out create_graph."
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return {"first": torch.tanh(self.layer(x)), "others": [x.detach(), self.layer(x).exp()]}


def penalty_on_input(model, x):
    torch.autograd.grad(model(x)["first"].sum(), x, create_graph=True)


def penalty_on_parameters(model, x):
    torch.autograd.grad(model(x)["others"][1].sum(), list(model.parameters()), create_graph=True)


def backward(model, x):
    model(x)["first"].sum().backward(create_graph=True)


def jacobian(model, x):
    torch.autograd.functional.jacobian(lambda x: model(x)["first"], x, create_graph=True)


def hvp(model, x):
    torch.autograd.functional.hvp(lambda x: model(x)["first"].sum(), x, torch.ones_like(x))


def test_second_derivatives_are_refused_and_first_ones_are_not():
    model = thunder.jit(Model(), transforms=pipeline_of(same=tx.Plugin(None)))
    x = torch.randn(2, 3, requires_grad=True)
    for ask in (penalty_on_input, penalty_on_parameters, backward, jacobian, hvp):
        with pytest.raises(PipelineError) as raised:
            ask(model, x)
        assert str(raised.value) == TEXT, ask.__name__
    loss = model(x)["first"].sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    eager = x.detach().clone().requires_grad_()
    torch.tanh(nn.functional.linear(eager, *model.parameters())).sum().backward()
    torch.testing.assert_close(once, eager.grad)
    with torch.no_grad():
        assert not model(x)["first"].requires_grad


def test_through_a_jitted_function_and_functional_transforms():
    model = thunder.jit(Model(), transforms=pipeline_of(same=tx.Plugin(None)))
    run = thunder.jit(lambda x: model(x)["first"] * 2)
    x = torch.randn(2, 3, requires_grad=True)
    for ask in (
        lambda: torch.autograd.grad(run(x).sum(), x, create_graph=True),
        lambda: torch.autograd.grad(run(x).sum(), list(model.parameters()), create_graph=True),
        lambda: torch.autograd.functional.hessian(lambda x: run(x).sum(), x),
    ):
        with pytest.raises(PipelineError) as raised:
            ask()
        assert str(raised.value) == TEXT
    run(x).sum().backward()
    assert x.grad is not None
    with pytest.raises((RuntimeError, PipelineError)):  # PyTorch refuses autograd functions of this kind there
        torch.func.grad(lambda x: model(x)["first"].sum())(torch.randn(2, 3))
