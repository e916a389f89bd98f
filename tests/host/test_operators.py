"""Operators of the project's own executor: they run wherever their call ends up, with or without gradients (U09)."""

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import VerificationError
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip

calls = []


def record(tensor, label):
    calls.append(label)
    return tensor.clone()


scale = tx.operator(
    "test_operators_scale",
    meta=lambda t, factor: tx.tensor_like(t),
    fn=lambda t, factor: t * factor,
    backward=lambda inputs, outputs, gradients: (gradients[0] * inputs[1], None),
)
widen = tx.operator(
    "test_operators_widen",
    meta=lambda t: (
        tx.tensor_like(t, dtype=torch.float64),
        tx.tensor_like(t, shape=(2, *t.shape), requires_grad=False),
    ),
    fn=lambda t: (t.double(), torch.stack([t, t])),
    backward=lambda inputs, outputs, gradients: (tx.ops.to(gradients[0], torch.float32),),
)
note = tx.operator(
    "test_operators_note",
    meta=lambda t, label: tx.tensor_like(t),
    fn=record,
    backward=lambda inputs, outputs, gradients: (gradients[0], None),
    side_effects=True,
)
idle = tx.operator("test_operators_idle", meta=lambda t: tx.tensor_like(t), fn=lambda t: t.clone())


class Scaled(tx.Plugin):
    """Scales every parameter by 3, through an operator with a plain Python argument."""

    @tx.hookimpl
    def before_autograd(self, computation):
        return computation.restore([((name,), lambda t: scale(t, 3.0)) for name in computation.parameters])


@pytest.mark.parametrize("mode", ["trained", "all frozen", "one frozen", "no_grad", "inference", "autograd disabled"])
def test_an_operator_runs_in_every_mode(mode):
    # U09: Thunder's own `synchronize` has no implementation unless something requires a gradient.
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if mode == "all frozen":
        model.requires_grad_(False)
    if mode == "one frozen":
        model[0].requires_grad_(False)
    options = {"disable_torch_autograd": True} if mode == "autograd disabled" else {}
    compiled = thunder.jit(model, transforms=pipeline_of(scaled=Scaled(None)), **options)
    x = torch.randn(5, 3)
    expected = nn.functional.linear(x, 3 * model[0].weight, 3 * model[0].bias).tanh()
    expected = nn.functional.linear(expected, 3 * model[2].weight, 3 * model[2].bias)
    with {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)():
        found = compiled(x)
    torch.testing.assert_close(found, expected)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert found.requires_grad == (mode in ("trained", "one frozen"))
    if found.requires_grad:
        wanted = torch.autograd.grad(expected.sum(), trained)
        found.sum().backward()
        for parameter, gradient in zip(trained, wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    if mode == "one frozen":
        assert model[0].weight.grad is None


def test_several_outputs_of_other_shapes_and_dtypes():
    class Widened(tx.Plugin):
        @tx.hookimpl
        def before_autograd(self, computation):
            def replacement(operation, edit):
                wide, _ = widen(operation.call())
                return tx.ops.to(wide * 2, torch.float32)

            return computation.rewrite("tanh", replacement)

    x = torch.randn(3, requires_grad=True)
    compiled = thunder.jit(nn.Tanh(), transforms=pipeline_of(widened=Widened(None)))
    found = compiled(x)
    torch.testing.assert_close(found, torch.tanh(x) * 2)
    (gradient,) = torch.autograd.grad(found.sum(), [x])
    torch.testing.assert_close(gradient, 2 * (1 - torch.tanh(x.detach()) ** 2))


class Noted(tx.Plugin):
    """Calls an operator on the output of every linear, and lets the model read its result or not."""

    def __init__(self, operator, *extra, used):
        super().__init__(None)
        self.operator = operator
        self.extra = extra
        self.used = used

    @tx.hookimpl
    def before_autograd(self, computation):
        def replacement(operation, edit):
            result = operation.call()
            returned = self.operator(result, *self.extra)
            return returned if self.used else result

        return computation.rewrite("linear", replacement)


@pytest.mark.parametrize("trained", [True, False])
def test_an_operator_with_side_effects_runs_once_a_call(trained):
    model = nn.Linear(3, 3).requires_grad_(trained)
    compiled = thunder.jit(model, transforms=pipeline_of(noted=Noted(note, "here", used=True)))
    calls.clear()
    x = torch.randn(2, 3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    assert calls == ["here", "here"]


def test_an_operator_with_side_effects_that_would_vanish_is_refused():
    # Thunder's differentiation drops operators that lead to no output, whatever their tags say.
    compiled = thunder.jit(nn.Linear(3, 3), transforms=pipeline_of(noted=Noted(note, "here", used=False)))
    with pytest.raises(VerificationError, match=f"'{note.name}' has side effects, but nothing reads"):
        compiled(torch.randn(2, 3))


def test_an_operator_without_side_effects_goes_if_nothing_uses_it():
    noted = Noted(idle, used=False)
    compiled = thunder.jit(nn.Linear(3, 3).requires_grad_(False), transforms=pipeline_of(noted=noted))
    compiled(torch.randn(2, 3))
    assert idle.name not in [b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols]


def test_the_trace_shows_the_operator_and_the_view_knows_it():
    seen = []

    class Look(tx.Plugin):
        @tx.hookimpl
        def before_autograd(self, computation):
            seen.extend(operation.operator for operation in computation.operations() if operation.operator)

        @tx.hookimpl
        def after_optimization(self, schedule):
            seen.append((schedule.phase, schedule.count(scale)))

    pipeline = pipeline_of(scaled=Scaled(None), look=Look(None))
    thunder.jit(nn.Linear(3, 3), transforms=pipeline)(torch.randn(2, 3))
    assert seen == [scale, scale, ("forward", 2), ("backward", 0)]
    assert repr(scale) == "<operator test_operators_scale>"


@pytest.mark.parametrize(
    ("name", "message"), [("not a name", "not a Python identifier"), (scale.name, "exists already")]
)
def test_bad_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        tx.operator(name, meta=lambda t: t, fn=lambda t: t)


def test_proxies_like_others():
    seen = {}

    class Look(tx.Plugin):
        @tx.hookimpl
        def before_autograd(self, computation):
            def look(operation, edit):
                given = operation.args[0]
                seen["same"] = tx.tensor_like(given)
                seen["other"] = tx.tensor_like(given, shape=[4], dtype=torch.bfloat16, requires_grad=True)
                return None

            return computation.rewrite("tanh", look)

    thunder.jit(nn.Tanh(), transforms=pipeline_of(look=Look(None)))(torch.ones(2, 3))
    same, other = seen["same"], seen["other"]
    assert (tuple(same.shape), str(same.dtype), same.requires_grad) == ((2, 3), "thunder.dtypes.float32", False)
    assert (tuple(other.shape), str(other.dtype), other.requires_grad) == ((4,), "thunder.dtypes.bfloat16", True)
