"""What one plugin leaves inconsistent, or does without declaring it, is found before the next one runs."""

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import VerificationError
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip
from thunder.core import prims
from thunder.core.trace import TraceCtx, from_trace, tracectx

allreduce = tx.operator(
    "test_verify_collective",
    meta=lambda t: tx.tensor_like(t),
    fn=lambda t: t.clone(),
    backward=lambda inputs, outputs, gradients: gradients,
    collective=True,
)

twice = tx.operator(
    "test_verify_twice",
    meta=lambda t: tx.tensor_like(t),
    fn=lambda t: t * 2,
    backward=lambda inputs, outputs, gradients: (gradients[0] * 2,),
)


def with_operators(computation, change):
    """A computation whose bound symbols were changed behind the back of the input table."""
    new = from_trace(computation._trace)
    new.bound_symbols = change(list(computation._trace.bound_symbols))
    return tx.Computation(new, computation._table)


class Trace(tx.Plugin):
    """Edits bound symbols directly, as no plugin should."""

    def __init__(self, change):
        super().__init__(None)
        self.change = change

    @tx.hookimpl
    def before_autograd(self, computation):
        return with_operators(computation, self.change)


def forget_flat_arg(bsyms):
    returned = bsyms[-1].args[0]
    return [*bsyms[:-1], bsyms[-1].from_bsym(args=({**returned, "flat_args": returned["flat_args"][:-1]},))]


def swap_flat_args(bsyms):
    returned = bsyms[-1].args[0]
    return [*bsyms[:-1], bsyms[-1].from_bsym(args=({**returned, "flat_args": returned["flat_args"][::-1]},))]


def drop_first_operator(bsyms):
    first = next(i for i, b in enumerate(bsyms) if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL)
    return bsyms[:first] + bsyms[first + 1 :]


def repeat_first_operator(bsyms):
    first = next(i for i, b in enumerate(bsyms) if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL)
    return bsyms[: first + 1] + bsyms[first:]


def reverse_operators(bsyms):
    body = [b for b in bsyms[:-1] if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    return [*bsyms[: -1 - len(body)], *body[::-1], bsyms[-1]]


def forget_unpacking(bsyms):
    return bsyms[1:]


def misread_a_shape(bsyms):
    first = next(i for i, b in enumerate(bsyms) if b.sym.name == "linear")
    x, *others = bsyms[first].args
    with tracectx(TraceCtx(None)):
        wrong = x.replace(shape=(7, 7))
    return [*bsyms[:first], bsyms[first].from_bsym(args=(wrong, *others)), *bsyms[first + 1 :]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (forget_flat_arg, "flat_args lacks or reorders arguments: missing .'t_2_weight'"),
        (swap_flat_args, "flat_args lacks or reorders arguments"),
        (drop_first_operator, "'tanh' in the computation reads 't3', which nothing produces before it"),
        (reverse_operators, "which nothing produces before it"),
        (repeat_first_operator, "'t3' is produced twice in the computation, the second time by 'linear'"),
        (forget_unpacking, "arguments .'input'. of the computation are not unpacked"),
        (misread_a_shape, r"'linear' in the computation reads 'input' as \(7, 7\), but it is \(2, 3\)"),
    ],
)
def test_broken_traces_are_blamed_on_the_plugin_with_both_traces(change, message):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))
    pipeline = pipeline_of(innocent=tx.Plugin(None), dummy=Trace(change), later=tx.Plugin(None))
    compiled = thunder.jit(model, transforms=pipeline)
    with pytest.raises(VerificationError, match=message) as caught:
        compiled(torch.randn(2, 3))
    error = caught.value
    assert (error.plugin, error.distribution) == ("dummy", "thunder-xform-dummy")
    assert error.hook == "before_autograd"
    assert error.before.count("ltorch.linear") == 2
    assert "def computation(" in error.after
    assert error.before != error.after
    assert tx.handle(compiled).events == ()


def test_verification_can_be_turned_off():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    doubled = Insert(lambda c: c.rewrite("linear", lambda op, e: op.call() * 2))
    compiled = thunder.jit(model, transforms=pipeline_of(doubled=doubled, _writes=(), _verify=False))
    torch.testing.assert_close(compiled(x), model(x) * 2)


class State(tx.Plugin):
    def __init__(self, change):
        super().__init__(None)
        self.change = change

    @tx.hookimpl
    def update_model_state(self, params):
        self.change(params)


def override(params, tensor):
    params._ledger.module._overrides_parameters["weight"] = tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: override(p, nn.Parameter(torch.ones(2, 3))),
            r"'weight' is \(\(2, 3\), .* recorded as \(\(3, 3\)",
        ),
        (lambda p: override(p, nn.Parameter(torch.ones(3, 3).double())), "'weight' is .*torch.float64"),
        (
            lambda p: p.replace("weight", torch.ones(9), layout="flat"),
            "input 't_weight' is .* stored as .9,.",
        ),
    ],
)
def test_changes_of_shape_that_the_trace_does_not_know_are_found(change, message):
    compiled = thunder.jit(nn.Linear(3, 3), transforms=pipeline_of(dummy=State(change)))
    with pytest.raises(VerificationError, match=message) as caught:
        compiled(torch.randn(2, 3))
    assert caught.value.plugin == "dummy"


@pytest.mark.parametrize(
    ("change", "effect", "declared"),
    [
        (lambda p: p.add("extra", torch.ones(2)), "params.set", ("params.data", "buffers")),
        (lambda p: p.add("extra", torch.ones(2), kind="buffer"), "buffers.set", ("params",)),
        (lambda p: p.replace("weight", torch.ones(3, 3)), "params.data", ("params.layout", "trace")),
        (lambda p: p.replace("weight", torch.ones(9), layout="flat"), "params.layout", ("params.data",)),
        (lambda p: p.replace("weight", torch.ones(4, 3), shape=(4, 3)), "params.shape", ("params.layout",)),
        (lambda p: p.replace("weight", p.tensor("weight").double()), "params.dtype", ("params.data",)),
        (lambda p: p.set_requires_grad("weight", False), "params.requires_grad", ("params.data",)),
    ],
)
def test_undeclared_changes_of_state_are_refused_at_jit(change, effect, declared):
    model = nn.Linear(3, 3)
    before = {name: (p, p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    with pytest.raises(VerificationError, match=f"effect '{effect}'") as caught:
        thunder.jit(model, transforms=pipeline_of(dummy=State(change), _writes=declared))
    assert caught.value.hook == "update_model_state"
    thunder.jit(model, transforms=pipeline_of(dummy=State(change), _writes=("params", "buffers")))
    thunder.jit(model, transforms=pipeline_of(dummy=State(change), _writes=(effect, *declared)))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.requires_grad == before[name][2]


class Insert(tx.Plugin):
    def __init__(self, edit):
        super().__init__(None)
        self.edit = edit

    @tx.hookimpl
    def before_autograd(self, computation):
        return self.edit(computation)


@pytest.mark.parametrize(
    ("edit", "effect", "declared"),
    [
        (
            lambda c: c.rewrite("linear", lambda op, e: op.call() * 2),
            "trace.compute.linear",
            ("trace.collectives", "trace.compute.tanh", "params"),
        ),
        (lambda c: c.rewrite("tanh", lambda op, e: op.args[0]), "trace.compute.tanh", ("trace.collectives",)),
        (lambda c: c.recompute("tanh"), "trace.saved", ("trace.compute", "trace.collectives")),
        (lambda c: c.restore([(("0.bias",), twice)]), "trace.compute", ("trace.collectives", "trace.compute.linear")),
        (lambda c: c.restore([(("0.weight",), allreduce)]), "trace.collectives", ("trace.compute", "params")),
    ],
)
def test_undeclared_changes_of_the_trace_are_refused(edit, effect, declared):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3)
    compiled = thunder.jit(model, transforms=pipeline_of(dummy=Insert(edit), _writes=declared))
    with pytest.raises(VerificationError, match=f"effect '{effect}'"):
        compiled(x)
    thunder.jit(model, transforms=pipeline_of(dummy=Insert(edit), _writes=(*declared, effect)))(x)


def test_reading_and_restoring_nothing_has_no_effect():
    model = nn.Linear(3, 3)
    quiet = Insert(lambda c: c.rewrite("linear", lambda op, e: None).restore([]))
    thunder.jit(model, transforms=pipeline_of(quiet=quiet, _writes=()))(torch.randn(2, 3))


@pytest.mark.parametrize("hook", ["mutate_prologue", "before_autograd", "after_optimization"])
def test_a_hook_that_returns_something_else_is_named(hook):
    plugin = type("Wrong", (tx.Plugin,), {hook: tx.hookimpl(lambda self, ctx: "nonsense")})(None)
    compiled = thunder.jit(nn.Linear(3, 3), transforms=pipeline_of(wrong=plugin))
    with pytest.raises(VerificationError, match=f"'wrong' .* in {hook}: it returned a str"):
        compiled(torch.randn(2, 3))
