"""Edits of the computation against eager PyTorch: values, gradients, buffers, forms of output."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.errors import PipelineError
from thunder_xform.testing import assert_same_numerics, pipeline_of

identity = tx.operator(
    "test_computation_identity",
    meta=lambda *tensors: tuple(tx.tensor_like(t) for t in tensors),
    fn=lambda *tensors: tuple(t.clone() for t in tensors),
    backward=lambda inputs, outputs, gradients: gradients,
)
negate = tx.operator(
    "test_computation_negate",
    meta=lambda t: tx.tensor_like(t),
    fn=lambda t: -t,
    backward=lambda inputs, outputs, gradients: (None if gradients[0] is None else tx.ops.neg(gradients[0]),),
)


class Restore(tx.Plugin):
    """Puts an operator between every trainable parameter and its uses, one for each or one for all."""

    def __init__(self, *, together=False, recompute=False):
        super().__init__(None)
        self.together = together
        self.recompute = recompute

    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        names = computation.differentiable_parameters
        groups = [names] if self.together else [(name,) for name in names]
        return computation.restore([(g, identity) for g in groups if g], recompute=self.recompute)


class Negated(tx.Plugin):
    """Holds the negative of every parameter and negates it again in the computation."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in params:
            params.replace(name, -params.tensor(name))

    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        return computation.restore([((name,), negate) for name in computation.parameters if name in ctx.parameters])


class Doubled(tx.Plugin):
    """Doubles the output of every linear."""

    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        return computation.rewrite("linear", lambda op, edit: op.call() * 2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, tokens):
        h = self.inner(self.embedding(tokens)) * self.scale
        return self.head(self.inner(h) + self.scale)


class Returns(nn.Module):
    """Returns a parameter, a buffer and an input as they are, next to something computed, all nested."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("offset", torch.randn(3))

    def forward(self, x, *, factor=2.0, extra=None):
        out = {"y": (x * self.weight * factor, [self.weight, self.offset]), "x": x}
        return out if extra is None else (out, {"extra": extra + self.offset})


class OnlyParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.weight


def batch_norm():
    # Without the bias: the gradient of one before a batch norm is rounding noise around zero.
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))


CASES = {
    "tied": (Tied, lambda: (torch.randint(0, 7, (5,)),), {}),
    "returns with keywords": (Returns, lambda: (torch.randn(2, 3),), {"factor": 0.5, "extra": torch.ones(3)}),
    "only a parameter": (OnlyParameter, lambda: (torch.randn(3),), {}),
    "batch norm": (batch_norm, lambda: (torch.randn(6, 3),), {}),
    "root linear": (lambda: nn.Linear(3, 5), lambda: (torch.randn(2, 3),), {}),
}
PIPELINES = {
    "no hooks": lambda: pipeline_of(nothing=tx.Plugin(None)),
    "restore each": lambda: pipeline_of(restore=Restore()),
    "restore together, recomputed": lambda: pipeline_of(restore=Restore(together=True, recompute=True)),
    "restore twice": lambda: pipeline_of(first=Restore(), second=Restore(together=True)),
}


def make(case):
    torch.manual_seed(0)
    module, inputs, kwargs = CASES[case]
    return module(), inputs(), kwargs


@pytest.mark.parametrize(
    ("case", "pipeline"),
    [(case, pipeline) for case in ("tied", "returns with keywords", "batch norm") for pipeline in PIPELINES]
    + [(case, "restore together, recomputed") for case in ("only a parameter", "root linear")],
)
def test_pipelines_that_change_nothing_agree_with_eager(case, pipeline):
    model, inputs, kwargs = make(case)
    assert_same_numerics(model, inputs, PIPELINES[pipeline](), kwargs=kwargs, calls=2)


def test_an_empty_pipeline_is_thunder_alone():
    model, inputs, kwargs = make("tied")
    assert_same_numerics(model, inputs, pipeline_of(), kwargs=kwargs)


@pytest.mark.parametrize("case", ["tied", "batch norm", "returns with keywords", "only a parameter"])
def test_replaced_parameters_are_restored(case):
    model, inputs, kwargs = make(case)
    expected = copy.deepcopy(model)
    compiled = thunder.jit(model, transforms=pipeline_of(negated=Negated(None)))
    wanted, found = expected(*inputs, **kwargs), compiled(*inputs, **kwargs)
    torch.testing.assert_close(found, wanted)
    for outputs in (wanted, found):
        sum(t.square().sum() for t in tree_leaves(outputs) if t.requires_grad).backward()
    plain = dict(expected.named_parameters())
    for name, parameter in compiled.named_parameters():
        wanted_gradient = plain[name].grad
        torch.testing.assert_close(parameter.grad, None if wanted_gradient is None else -wanted_gradient)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_recomputed_parameters_run_again_in_the_backward_and_are_not_saved():
    def saved_and_backward(recompute):
        model, inputs, _ = make("tied")
        compiled = thunder.jit(model, transforms=pipeline_of(restore=Restore(together=True, recompute=recompute)))
        compiled(*inputs)
        forward = thunder.last_traces(compiled)[-1]
        restored = {o.name for b in forward.bound_symbols if b.sym.name == identity.name for o in b.flat_proxy_outs}
        saved = {t.name for t in forward.bound_symbols[-1].args[1][0]}
        backward = [b.sym.name for b in thunder.last_backward_traces(compiled)[-1].bound_symbols]
        return len(restored), restored & saved, backward.count(identity.name)

    # The gradients need the two weights (and the scale, broadcast, which is another tensor).
    count, kept, again = saved_and_backward(recompute=False)
    assert (count, len(kept), again) == (4, 2, 0)
    count, kept, again = saved_and_backward(recompute=True)
    assert (count, kept, again) == (4, set(), 1)


def test_rewriting_composes_with_gradients():
    model, inputs, _ = make("tied")

    class Reference(Tied):
        def forward(self, tokens):
            h = self.inner(self.embedding(tokens)) * 2 * self.scale
            return self.head(self.inner(h) * 2 + self.scale) * 2

    reference = Reference()
    reference.load_state_dict(model.state_dict())
    pipeline = pipeline_of(first=Restore(), doubled=Doubled(None), last=Restore(together=True))
    compiled = assert_same_numerics(model, inputs, pipeline, reference=reference)
    assert tx.handle(compiled).pipeline == ("first", "doubled", "last")


class Inspect(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        self.parameters = computation.parameters
        self.differentiable = computation.differentiable_parameters
        self.operations = [
            (operation.name, operation.parameter(0), operation.parameter(1)) for operation in computation.operations()
        ]


def test_the_view_names_parameters_in_order_of_first_use_and_tied_ones_once():
    model, inputs, _ = make("tied")
    model.scale.requires_grad_(False)
    inspect = Inspect(None)
    thunder.jit(model, transforms=pipeline_of(inspect=inspect))(*inputs)
    assert inspect.parameters == ("embedding.weight", "inner.weight", "inner.bias", "scale")
    assert inspect.differentiable == ("embedding.weight", "inner.weight", "inner.bias")
    linears = [operation for operation in inspect.operations if operation[0] == "linear"]
    assert [weight for _, _, weight in linears] == ["inner.weight", "inner.weight", "embedding.weight"]


def test_a_parameter_that_is_only_returned_counts_and_an_unused_one_does_not():
    model, inputs, kwargs = make("returns with keywords")
    inspect = Inspect(None)
    thunder.jit(model, transforms=pipeline_of(inspect=inspect))(*inputs, **kwargs)
    assert inspect.parameters == ("weight", "offset")
    assert inspect.differentiable == ("weight",)
    model, inputs, kwargs = make("only a parameter")
    thunder.jit(model, transforms=pipeline_of(inspect=inspect))(*inputs)
    assert inspect.parameters == ("weight",)


class Bad(tx.Plugin):
    def __init__(self, edit):
        super().__init__(None)
        self.edit = edit

    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        return self.edit(computation)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda c: c.rewrite("linear", lambda op, e: op.output),
            "'linear' reads .* of the call that it replaces",
        ),
        (
            lambda c: c.rewrite("linear", lambda op, e: op.output * 2),
            "'linear' reads .* of the call that it replaces",
        ),
        (lambda c: c.rewrite("linear", lambda op, e: op.args[0]), r"\(2, 3\) .* stands for \(2, 5\)"),
        (
            lambda c: c.rewrite("linear", lambda op, e: op.call().to(torch.float64)),
            "float64 stands for .*float32",
        ),
        (lambda c: c.rewrite("linear", lambda op, e: (op.call(), op.call())), "2 tensors stand for"),
        (lambda c: c.rewrite("linear", lambda op, e: 3.0), "3.0 stands for a tensor"),
        (
            lambda c: c.rewrite("linear", lambda op, e: e.parameter("wieght")),
            "no parameter .*'wieght'.*'weight'",
        ),
        (lambda c: c.restore([(("nothing",), identity)]), "Cannot restore 'nothing'"),
        (lambda c: c.restore([(("weight", "bias"), lambda a, b: a)]), "1 tensors stand for"),
        (lambda c: c.restore([(("weight", "bias"), lambda a, b: (b, a))]), "stands for"),
        (lambda c: c.restore([(("weight",), identity), (("weight",), identity)]), "'weight' .*twice"),
    ],
)
def test_edits_that_do_not_fit_are_refused_by_name(edit, message):
    model, inputs, _ = make("root linear")
    compiled = thunder.jit(model, transforms=pipeline_of(bad=Bad(edit)))
    with pytest.raises(PipelineError, match=message):
        compiled(*inputs)


def test_what_the_model_updates_in_place_is_not_restored():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(2))

        def forward(self, x):
            self.calls.add_(1)
            return self.layer(x) + self.calls

    class Restoring(tx.Plugin):
        @tx.hookimpl
        def before_autograd(self, computation, ctx):
            return computation.restore([(("calls",), lambda values: [values[0] * 2])])

    plain = Counting()
    model = thunder.jit(plain, transforms=pipeline_of(restoring=Restoring(None)))
    with pytest.raises(tx.errors.XformError) as raised:
        model(torch.ones(1, 2))
    assert (
        "Cannot restore 'calls': the model updates it in place, and the update would go into the restored copy."
        in str(raised.value)
    )
    assert torch.equal(plain.calls, torch.zeros(2))
    assert torch.equal(model.get_buffer("calls"), torch.zeros(2))
