"""What traced code asks of tensors is answered as in eager PyTorch."""

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import TracingError

import thunder  # isort: skip

QUESTIONS = {
    "dtype": lambda m, x, y, z: (
        x.dtype == torch.float32,
        x.dtype is torch.float32,
        x.dtype in (torch.float16, torch.float32),
        {torch.float32: True}.get(x.dtype, False),
        str(x.dtype),
        x.dtype.is_floating_point,
        m.w.dtype != torch.float32,
        (x + 1).to(torch.bfloat16).dtype == torch.bfloat16,
        torch.promote_types(x.dtype, torch.float64) == torch.float64,
        torch.finfo(x.dtype).eps,
    ),
    "device and type": lambda m, x, y, z: (
        x.device == torch.device("cpu"),
        str(x.device),
        isinstance(x.device, torch.device),
        type(x) is torch.Tensor,
        type(m.w) is nn.Parameter,
        x.__class__ is torch.Tensor,
        isinstance(x.shape, torch.Size),
        x.layout == torch.strided,
    ),
    "identity": lambda m, x, y, z: (
        x is y,
        x is not y,
        x is z,
        m.w is m.v,
        x is m.w,
        id(x) == id(y),
        any(t is x for t in [y]),
        x.contiguous() is x,
        x.to(torch.float32) is x,
        (x * 1) is x,
    ),
    "layout": lambda m, x, y, z: (
        x.is_contiguous(),
        z.is_contiguous(),
        z.stride() == (1, 2),
        x.stride(0),
        x.t().is_contiguous(),
        m.w.t().contiguous().is_contiguous(),
        x[1:].storage_offset(),
    ),
    "gradients": lambda m, x, y, z: (
        x.requires_grad,
        m.w.requires_grad,
        (m.w * 2).requires_grad,
        (m.w * 2).detach().requires_grad,
        (x * 2).requires_grad,
        (m.w * 2).is_leaf,
    ),
}


class Asks(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 3))
        self.v = self.w
        self.register_buffer("c", torch.tensor(3.0))
        self.question = question

    def forward(self, x, y, z):
        answers = [1 if a is True else 0 if a is False else a for a in self.question(self, x, y, z)]
        return (x * self.w).sum(), answers


def compiled(model):
    return thunder.jit(model, transforms=tx.registry.resolve([]))


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_those_of_eager_pytorch(name):
    model, x, z = Asks(QUESTIONS[name]), torch.ones(2, 3), torch.ones(3, 2).t()
    assert compiled(model)(x, x, z)[1] == model(x, x, z)[1]


def test_an_entry_is_for_one_layout_and_one_pattern_of_identity():
    def question(m, x, y, z):
        return x is y, z.is_contiguous()

    model, x, z = Asks(question), torch.ones(2, 3), torch.ones(2, 3)
    jitted = compiled(model)
    for args in ((x, x, z), (x, x.view_as(x), z), (x, x, torch.ones(3, 2).t()), (x, x, z)):
        assert jitted(*args)[1] == model(*args)[1]


def decides(m, x, y, z):
    if m.c.item() == 3:
        return (1,)
    return (0,)


def test_a_decision_by_data_is_refused():
    line = decides.__code__.co_firstlineno + 1
    with pytest.raises(TracingError) as caught:
        compiled(Asks(decides))(*[torch.ones(2, 3)] * 3)
    assert str(caught.value) == (
        f"The model decides by a number that is only known when it runs ({__file__}:{line}: if m.c.item() == 3:). "
        "Compute both ways and choose with torch.where, or take the decision outside of forward."
    )


def watches(m, x, y, z):
    h = m.w * 2
    h.register_hook(print)
    return (1,)


def test_a_hook_that_would_never_be_called_is_refused():
    line = watches.__code__.co_firstlineno + 2
    with pytest.raises(TracingError) as caught:
        compiled(Asks(watches))(*[torch.ones(2, 3)] * 3)
    assert str(caught.value) == (
        "The model calls register_hook of a tensor, whose backward is compiled and calls no hooks "
        f"({__file__}:{line}: h.register_hook(print)). "
        "Return the tensor and call it on the output, outside of forward."
    )
