"""V03: operators in place have the gradients and effects that they have in eager PyTorch, or are refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import PipelineError
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip

WIDTH = 6


def then(*steps):
    """Run ``steps`` in order on one tensor and return what the last one returns."""

    def run(h, x):
        for step in steps:
            out = step(h, x)
        return out

    return run


def pieces(h, x):
    left, right = h.chunk(2, -1)
    left.pow_(2)
    right.mul_(left)
    return h.sin()


#: On the output of a layer.
FRESH = {
    "silu": lambda h, x: F.silu(h, inplace=True),
    "hardswish": lambda h, x: F.hardswish(h, inplace=True),
    "elu": lambda h, x: F.elu(h, inplace=True),
    "selu": lambda h, x: F.selu(h, inplace=True),
    "mish": lambda h, x: F.mish(h, inplace=True),
    "celu": lambda h, x: F.celu(h, inplace=True),
    "relu": lambda h, x: F.relu(h, inplace=True),
    "relu6": lambda h, x: F.relu6(h, inplace=True),
    "leaky_relu": lambda h, x: F.leaky_relu(h, 0.1, True),
    "hardtanh": lambda h, x: F.hardtanh(h, inplace=True),
    "threshold": lambda h, x: F.threshold(h, 0.1, 0.2, inplace=True),
    "add_": lambda h, x: h.add_(x, alpha=2),
    "sub_": lambda h, x: h.sub_(x),
    "mul_": lambda h, x: h.mul_(x),
    "div_": lambda h, x: h.div_(x.abs() + 1),
    "pow_": lambda h, x: h.abs_().add_(0.1).pow_(3),
    "sqrt_": lambda h, x: h.abs_().add_(1).sqrt_(),
    "exp_": lambda h, x: h.exp_(),
    "log_": lambda h, x: h.abs_().add_(1).log_(),
    "sin_": lambda h, x: h.sin_(),
    "tanh_": lambda h, x: h.tanh_(),
    "clamp_": lambda h, x: h.clamp_(-0.3, 0.3),
    "reciprocal_": lambda h, x: h.abs_().add_(1).reciprocal_(),
    "addcmul_": lambda h, x: h.addcmul_(x, x, value=0.5),
    "masked_fill_": lambda h, x: h.masked_fill_(x > 0, 1.0).exp_(),
    "zero_": lambda h, x: h.zero_() + x,
    "copy_": lambda h, x: h.copy_(x) * h,
    "statement": then(lambda h, x: h.mul_(2), lambda h, x: h.exp_(), lambda h, x: h * h),
    "setitem": then(lambda h, x: h.__setitem__((slice(None), 0), x[:, 1]), lambda h, x: h**2),
    "another dtype": lambda h, x: h.float().mul_(x).double(),
    # Eager PyTorch raises where these read in the backward what was overwritten; out of place they mean the same.
    "itself": lambda h, x: h.mul_(h),
    "its square": lambda h, x: h.sub_(h * h),
    "out of order": lambda h, x: h.exp() + h.mul_(3),
}
OUT_OF_PLACE = {
    "itself": lambda h, x: h * h,
    "its square": lambda h, x: h - h * h,
    "out of order": lambda h, x: h.exp() + h * 3,
}
VIEWS = {
    "slice": then(lambda h, x: h[:, :2].mul_(2), lambda h, x: h * h),
    "row": then(lambda h, x: h[1].exp_(), lambda h, x: h * h),
    "augmented": then(lambda h, x: h[:, 0].__imul__(x[:, 0]), lambda h, x: h * h),
    "view": then(lambda h, x: h.view(2, 12)[0].pow_(2), lambda h, x: h.t().mul_(3), lambda h, x: h * h),
    "reshape": lambda h, x: F.silu(h.reshape(-1), inplace=True),
    "transpose": then(lambda h, x: h.T[0].mul_(2), lambda h, x: h.mT[1].sin_(), lambda h, x: h * h),
    "squeeze": then(lambda h, x: h.unsqueeze(0).squeeze(0).tanh_(), lambda h, x: h * h),
    "copy": then(lambda h, x: h[:, 1:3].copy_(x[:, :2]), lambda h, x: h[:, 2:].add_(x[:, 2:]), lambda h, x: h.exp()),
    "dropout": then(lambda h, x: F.dropout(h, 0.5, False).mul_(2), lambda h, x: h * h),
    "same": then(lambda h, x: h.to(torch.float64).mul_(2), lambda h, x: h * h),
    "diagonal": then(lambda h, x: h.diagonal().mul_(2), lambda h, x: h * h),
    "view of what was written": lambda h, x: h.mul_(2)[:, 0].exp_() + h[:, 0],
    "base written, view read": lambda h, x: (lambda v: (h.mul_(2), v * v)[1])(h[:, 3:]),
    "chunk": pieces,
}
#: Eager PyTorch refuses to write into one of several views.
OUT_OF_PLACE_VIEWS = {
    "chunk": lambda h, x: torch.cat([h[:, :3] ** 2, h[:, 3:] * h[:, :3] ** 2], -1).sin(),
    "dropout": lambda h, x: (2 * h) ** 2,
}


class Table(nn.Module):
    """A layer for each operator, so that each has gradients of its own."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in functions).double()

    def forward(self, x):
        return [fn(layer(x).add(0), x) for layer, fn in zip(self.layers, self.functions, strict=True)]


def gradients(model, x):
    outputs = model(x)
    sum(out.square().sum() for out in outputs).backward()
    return [out.detach() for out in outputs], [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("table", "instead"), [(FRESH, OUT_OF_PLACE), (VIEWS, OUT_OF_PLACE_VIEWS)], ids=["layers", "views"]
)
def test_gradients_are_those_of_eager(table, instead):
    torch.manual_seed(0)
    plain = Table(list((table | instead).values()))
    model = Table(list(table.values()))
    model.load_state_dict(plain.state_dict())
    model = thunder.jit(model, transforms=pipeline_of(same=tx.Plugin(None)))
    x = torch.randn(4, WIDTH).double()
    (outputs, found), (expected_outputs, expected) = gradients(model, x.clone()), gradients(plain, x.clone())
    for index, (name, out, right) in enumerate(zip(table, outputs, expected_outputs, strict=True)):
        mine, theirs = found[2 * index : 2 * index + 2], expected[2 * index : 2 * index + 2]
        torch.testing.assert_close(out, right, msg=lambda text, name=name: f"output of {name}: {text}")
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"gradients of {name}: {text}")


class Stateful(nn.Module):
    """What it writes into buffers and its input must be there afterwards, and the gradients need what was there."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        for name in ("calls", "scale", "rows"):
            self.register_buffer(name, torch.rand(4, WIDTH))
        self.double()

    def forward(self, x):
        h = self.layer(x) * self.scale
        self.calls.add_(1)
        self.rows[0].add_(h[1].detach())
        self.rows[:, 2].copy_(x[:, 0])
        out = (h * self.calls + self.rows.sin() * h, x.mul_(2), x)
        self.scale.mul_(2)
        return (*out, self.scale)


def test_buffers_and_inputs_are_written_after_they_were_read():
    torch.manual_seed(0)
    plain = Stateful()
    model = thunder.jit(copy.deepcopy(plain), transforms=pipeline_of(same=tx.Plugin(None)))
    expected = copy.deepcopy(plain)
    for _ in range(2):
        x = torch.randn(4, WIDTH).double()
        mine, theirs = x.clone(), x.clone()
        found = model(mine)
        # Eager PyTorch raises when what the backward reads was overwritten: there it reads a copy.
        scale = expected.scale.clone()
        h = F.linear(theirs.clone(), expected.layer.weight, expected.layer.bias) * scale
        with torch.no_grad():
            expected.calls.add_(1)
            expected.rows[0].add_(h[1])
            expected.rows[:, 2].copy_(theirs[:, 0])
        out = h * expected.calls.clone() + expected.rows.sin() * h
        theirs.mul_(2)
        expected.scale.mul_(2)
        torch.testing.assert_close(found[:3], (out, theirs, theirs))
        torch.testing.assert_close(found[3], expected.scale)
        assert found[1].data_ptr() == mine.data_ptr()
        torch.testing.assert_close(mine, theirs)
        found[0].square().sum().backward()
        out.square().sum().backward()
    torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


class Refused(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4, 4))
        self.fn = fn

    def forward(self, x):
        return self.fn(self, x)


def without_gradients(m, x):
    h = m.layer(x)
    with torch.no_grad():
        h.mul_(2)
    return h


class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


REFUSALS = {
    "input": (
        lambda m, x: m.layer(x.mul_(2)),
        "'mul_' changes the input 'x' in place, which requires a gradient. Change a copy of it.",
    ),
    "parameter": (
        lambda m, x: F.linear(x, m.layer.weight.mul_(2)),
        "'mul_' changes the parameter 'layer.weight' in place, which requires a gradient. Change a copy of it.",
    ),
    "buffer": (
        lambda m, x: m.total.add_(m.layer(x)),
        (
            "'add_' changes the buffer 'total' in place by a value that carries a gradient. "
            "Detach the value, or change a copy."
        ),
    ),
    "view of a buffer": (
        lambda m, x: (m.total[0].add_(m.layer(x)[0]), m.total)[1],
        (
            "'add_' changes the buffer 'total' in place by a value that carries a gradient. "
            "Detach the value, or change a copy."
        ),
    ),
    "without gradients": (
        without_gradients,
        (
            "'mul_' changes a tensor in place, without gradients, through which a gradient flows. "
            "Change it with gradients enabled, or change a detached copy."
        ),
    ),
    "perhaps a view": (
        lambda m, x: (lambda h: (h.contiguous().mul_(2), h)[1])(m.layer(x)),
        (
            "A tensor is changed in place and read under another name ('contiguous' made one of the other), of which "
            "compiled code cannot tell whether they share memory. Change a copy, or read what was changed."
        ),
    ),
    "detached": (
        lambda m, x: (lambda h: (h.detach().mul_(2), h)[1])(m.layer(x)),
        (
            "A tensor is changed in place and read under another name ('detach' made one of the other), of which "
            "compiled code cannot tell whether they share memory. Change a copy, or read what was changed."
        ),
    ),
    "inside a function": (
        lambda m, x: Inside.apply(m.layer(x)),
        "'Inside' changes what it is given in place. Write it without changes in place.",
    ),
}


@pytest.mark.parametrize(("fn", "text"), REFUSALS.values(), ids=REFUSALS)
def test_what_would_get_other_gradients_is_refused(fn, text):
    model = thunder.jit(Refused(fn), transforms=pipeline_of(same=tx.Plugin(None)))
    with pytest.raises(PipelineError) as raised:
        model(torch.randn(4, 4, requires_grad=True))
    assert str(raised.value) == text
