"""Pipelines with Thunder: one model, whole and in order, together with Thunder's own transforms."""

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import PipelineError
from thunder_xform.testing import assert_same_numerics, pipeline_of

import thunder  # isort: skip
from thunder.core.transform_common import Transform


class Freeze(tx.Plugin):
    """Replaces every parameter by a frozen copy of its double."""

    @tx.hookimpl
    def update_model_state(self, params):
        for name in params:
            params.replace(name, params.tensor(name) * 2, requires_grad=False)


class Doubled(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computation):
        return computation.rewrite("linear", lambda operation, edit: operation.call() * 2)


class Native(Transform):
    """A transform as Thunder's users write them."""

    def __init__(self):
        self.seen = []

    def transform_module(self, model):
        self.seen.append("module")

    def transform_traces_pre_prologue(self, prologue, computation, epilogue, **kwargs):
        self.seen.append([bsym.sym.name for bsym in computation.bound_symbols])
        return prologue, computation, epilogue


def state(model):
    return {name: (p, p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}


def same(model, before):
    now = state(model)
    return now.keys() == before.keys() and all(
        now[n][0] is before[n][0] and torch.equal(now[n][1], before[n][1]) and now[n][2] == before[n][2] for n in now
    )


def test_a_pipeline_is_a_list_of_transforms():
    pipeline = pipeline_of(freeze=Freeze(None), doubled=Doubled(None))
    assert isinstance(pipeline, list)
    assert len(pipeline) == 2
    assert all(isinstance(stage, Transform) for stage in pipeline)
    assert pipeline.names == ("freeze", "doubled")
    assert pipeline.plugin("doubled") is pipeline[1].plugin
    assert repr(pipeline) == "Pipeline('freeze + doubled')"
    with pytest.raises(PipelineError, match="freeze -> doubled has no plugin 'lora'"):
        pipeline.plugin("lora")


def test_the_users_module_stays_what_it_was():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    before = state(model)
    expected = 4 * model(x)
    compiled = thunder.jit(model, transforms=pipeline_of(freeze=Freeze(None), doubled=Doubled(None)))
    torch.testing.assert_close(compiled(x), expected)
    assert same(model, before)
    assert not compiled(x).requires_grad


def test_a_second_model_is_refused_and_the_first_still_works():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    before = state(second)
    pipeline = pipeline_of(freeze=Freeze(None), doubled=Doubled(None))
    compiled = thunder.jit(first, transforms=pipeline)
    with pytest.raises(PipelineError, match=r"pipeline \(freeze -> doubled\) transforms a model already"):
        thunder.jit(second, transforms=pipeline)
    assert same(second, before)
    x = torch.randn(2, 3)
    torch.testing.assert_close(compiled(x), 4 * first(x).detach())


@pytest.mark.parametrize("pick", [lambda p: p[::-1], lambda p: p[1:], lambda p: [p[0], p[2]], lambda p: [*p, p[0]]])
def test_stages_out_of_order_are_refused_at_jit(pick):
    model = nn.Linear(3, 3)
    before = state(model)
    pipeline = pipeline_of(freeze=Freeze(None), doubled=Doubled(None), last=Doubled(None))
    with pytest.raises(PipelineError, match=r"out of order|transforms a model already"):
        thunder.jit(model, transforms=pick(pipeline))
    assert same(model, before)


def test_a_part_of_a_pipeline_is_refused_at_the_first_call():
    model = nn.Linear(3, 3)
    before = state(model)
    pipeline = pipeline_of(freeze=Freeze(None), doubled=Doubled(None), last=Doubled(None))
    compiled = thunder.jit(model, transforms=pipeline[:2])
    for _ in range(2):
        with pytest.raises(PipelineError, match="Only freeze, doubled of the pipeline freeze -> doubled -> last"):
            compiled(torch.randn(2, 3))
    assert same(model, before)


def test_plugins_that_fail_at_jit_leave_the_module_as_it_was_and_are_named():
    class Failing(tx.Plugin):
        @tx.hookimpl
        def update_model_state(self, params):
            params.add("half", torch.ones(1))
            raise ZeroDivisionError("rank 0")

    model = nn.Linear(3, 3)
    before = state(model)
    with pytest.raises(ZeroDivisionError, match="rank 0") as caught:
        thunder.jit(model, transforms=pipeline_of(freeze=Freeze(None), failing=Failing(None)))
    assert caught.value.__notes__ == ["In update_model_state of plugin 'failing' [thunder-xform-failing]."]
    assert same(model, before)


@pytest.mark.parametrize("hook", ["mutate_prologue", "before_autograd", "after_optimization", "guard_key"])
def test_exceptions_in_hooks_name_the_plugin_and_a_retry_compiles(hook):
    armed = [True]

    def implementation(self, ctx):
        if armed[0]:
            raise ZeroDivisionError("bad day")

    plugin = type("Failing", (tx.Plugin,), {hook: tx.hookimpl(implementation)})(None)
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    compiled = thunder.jit(model, transforms=pipeline_of(first=tx.Plugin(None), failing=plugin))
    with pytest.raises(ZeroDivisionError) as caught:
        compiled(x)
    assert caught.value.__notes__ == [f"In {hook} of plugin 'failing' [thunder-xform-failing]."]
    assert tx.handle(compiled).events == ()
    armed[0] = False
    torch.testing.assert_close(compiled(x), model(x))
    assert [event.reasons for event in tx.handle(compiled).events] == [("first call",)]


@pytest.mark.parametrize("ours_first", [True, False])
def test_composition_with_transforms_of_thunder(ours_first):
    model, x, native = nn.Linear(3, 3), torch.randn(2, 3), Native()
    pipeline = pipeline_of(doubled=Doubled(None))
    others = [native]
    transforms = pipeline + others if ours_first else others + pipeline
    compiled = thunder.jit(model, transforms=transforms)
    torch.testing.assert_close(compiled(x), 2 * model(x))
    module, names = native.seen
    assert module == "module"
    assert ("mul" in names) == ours_first


def test_v28_a_plugin_needs_no_options():
    assert tx.Plugin().options is None
    assert Doubled().options is None


def test_an_empty_request_still_gives_a_pipeline():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
    compiled = assert_same_numerics(model, (x,), tx.registry.resolve([]), calls=2, atol=1e-5)
    assert tx.handle(compiled).pipeline == ("bare",)
    assert [event.reasons for event in tx.handle(compiled).events] == [("first call",)]
    assert tx.handle(compiled).state_dict().keys() == model.state_dict().keys()


def test_plugins_see_each_other_and_the_model_through_their_context():
    seen = {}

    class Look(tx.Plugin):
        @tx.hookimpl
        def update_model_state(self, params, ctx):
            seen[ctx.plugin] = (ctx.index, ctx.distribution, ctx.pipeline, ctx.module, ctx.plugins()["second"])
            params.add(f"{ctx.plugin}.extra", torch.ones(2))

        @tx.hookimpl
        def before_autograd(self, ctx):
            seen[ctx.plugin] += (list(ctx.parameters), ctx.version("first.extra").owner, ctx.event.number)
            if ctx.plugin == "first":
                with pytest.raises(KeyError, match=r"second\.extra"):
                    ctx.version("second.extra")

    model = nn.Linear(3, 3, bias=False)
    first, second = Look(None), Look(None)
    pipeline = pipeline_of(first=first, second=second)
    thunder.jit(model, transforms=pipeline)(torch.randn(2, 3))
    names = ["weight", "first.extra", "second.extra"]
    for index, name in enumerate(("first", "second")):
        distribution = f"thunder-xform-{name}"
        assert seen[name] == (index, distribution, ("first", "second"), model, second, names, "first", 0)
