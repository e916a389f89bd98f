"""V19: an input that no output in the loss depends on has no gradient, as in eager PyTorch."""

import copy

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip


class Model(nn.Module):
    """Outputs of different parameters; ``cut`` reaches none of them with a gradient, a tied weight two."""

    def __init__(self):
        super().__init__()
        self.shared, self.first, self.second, self.cut, self.tied = (nn.Linear(3, 3) for _ in range(5))
        self.tied.weight = self.first.weight

    def forward(self, x, y):
        h = torch.tanh(self.shared(x))
        hidden = h + self.cut(h).detach()
        return {
            "hidden": hidden,
            "nested": [self.first(h), (self.second(y), h.argmax(1))],
            "parts": self.tied(y).chunk(3, 1),
        }


LOSSES = {
    "hidden": lambda o: o["hidden"].square().sum(),
    "first": lambda o: o["nested"][0].square().sum(),
    "second": lambda o: o["nested"][1][0].square().sum(),
    "one part": lambda o: o["parts"][1].square().sum(),
    "two": lambda o: o["hidden"].sum() + o["nested"][1][0].square().sum(),
    "all": lambda o: sum(t.square().sum() for t in (o["hidden"], *o["nested"][:1], o["nested"][1][0], *o["parts"])),
}


def gradients(model, loss):
    x, y = (torch.linspace(-1, 1, 6).view(2, 3).requires_grad_() for _ in range(2))
    model.zero_grad()
    loss(model(x, y)).backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad, "y": y.grad}


def equal(found, expected):
    assert {n for n, g in found.items() if g is None} == {n for n, g in expected.items() if g is None}
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient)


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    plain = Model()
    return thunder.jit(copy.deepcopy(plain), transforms=pipeline_of(same=tx.Plugin(None))), plain


@pytest.mark.parametrize("loss", LOSSES)
def test_what_takes_no_part_in_the_loss_has_no_gradient(models, loss):
    model, plain = models
    equal(gradients(model, LOSSES[loss]), gradients(plain, LOSSES[loss]))


def test_momentum_does_not_go_on(models):
    model, plain = models
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain)]
    for loss in ("all", "hidden", "second", "two"):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            gradients(m, LOSSES[loss])
            optimizer.step()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), p, msg=name)


def test_autograd_grad_tells_what_is_unused(models):
    model, plain = models
    x = torch.randn(2, 3)
    for m in (model, plain):
        weights = [m.get_parameter("first.weight"), m.get_parameter("shared.weight")]
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(m(x, x)["hidden"].sum(), weights)
        unused, used = torch.autograd.grad(m(x, x)["hidden"].sum(), weights, allow_unused=True)
        assert unused is None
        assert used is not None


def test_two_calls_and_retained_graphs(models):
    results = []
    for m in models:
        m.zero_grad()
        x, y = torch.ones(2, 3), torch.full((2, 3), 0.5)
        one, other = m(x, y), m(y, x)
        (one["hidden"].sum() + other["nested"][0].square().sum()).backward(retain_graph=True)
        other["parts"][0].sum().backward()
        results.append({name: p.grad for name, p in m.named_parameters()})
    equal(*results)


def test_outputs_twice_views_and_inputs():
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            h = self.a(x)
            return h, h, h.view(-1), x, self.b(x), torch.where(x > 0, self.b(x), h)

    torch.manual_seed(0)
    plain = Same()
    model = thunder.jit(copy.deepcopy(plain), transforms=pipeline_of(same=tx.Plugin(None)))
    for numbers in ((0, 1), (0,), (1,), (2,), (3,), (4,), (1, 3), (5, 3), (0, 1, 2, 3, 4, 5)):
        results = []
        for m in (model, plain):
            m.zero_grad()
            x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
            out = m(x)
            sum(out[n].square().sum() * (n + 1) for n in numbers).backward()
            results.append({name: p.grad for name, p in m.named_parameters()} | {"x": x.grad})
        equal(*results)


def test_in_a_function_with_two_models():
    torch.manual_seed(0)
    plain = Model(), Model()
    compiled = [thunder.jit(copy.deepcopy(m), transforms=pipeline_of(same=tx.Plugin(None))) for m in plain]

    def both(one, other, x):
        a, b = one(x, x), other(x, x)
        return a["hidden"], b["nested"][0], a["nested"][1][0] * b["hidden"]

    x = torch.randn(2, 3)
    run = thunder.jit(lambda x: both(*compiled, x))
    for numbers in ((0,), (1,), (2,), (0, 2)):
        results = []
        for models, call in ((compiled, run), (plain, lambda x: both(*plain, x))):
            for m in models:
                m.zero_grad()
            out = call(x)
            sum(out[n].square().sum() for n in numbers).backward()
            results.append({f"{i}.{n}": p.grad for i, m in enumerate(models) for n, p in m.named_parameters()})
        equal(*results)
