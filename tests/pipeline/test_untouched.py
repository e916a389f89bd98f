"""The user's module stays untouched, no hook is dead, and transforms in front are named."""

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import LoadError, PipelineError, VerificationError
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip
from thunder.core.transform_common import Transform


class State(tx.Plugin):
    def __init__(self, change):
        super().__init__(None)
        self.change = change

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        self.change(params, ctx)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda p, c: p.tensor("0.weight").data.mul_(2), "it changes the values of '0.weight' in the user's module"),
        (lambda p, c: p.tensor("0.bias").data[1:2].zero_(), "it changes the values of '0.bias' in the user's module"),
        (
            lambda p, c: p.tensor("0.bias").requires_grad_(False),
            "it sets `requires_grad` of '0.bias' in the user's module to False",
        ),
        (lambda p, c: c.module[0].eval(), "it sets `training` of the user's module '0' to False"),
        (
            lambda p, c: setattr(c.module, "1", nn.ReLU()),
            "it replaces the module '1' of the user's module",
        ),
        (
            lambda p, c: c.module.register_buffer("extra", torch.ones(1)),
            "it adds the tensor 'extra' to the user's module",
        ),
    ],
)
def test_v45_a_plugin_that_changes_the_users_module_is_named(change, what):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with pytest.raises(VerificationError) as caught:
        thunder.jit(model, transforms=pipeline_of(dummy=State(change)))
    assert str(caught.value) == (
        f"'dummy' [thunder-xform-dummy] broke an invariant in update_model_state: {what}. "
        "Report it to the plugin's authors."
    )


class Frozen(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        ctx.module.weight.requires_grad_(False)


def test_v45_in_a_compilation():
    compiled = thunder.jit(nn.Linear(3, 3), transforms=pipeline_of(dummy=Frozen(None)))
    with pytest.raises(VerificationError, match=r"in before_autograd: it sets `requires_grad` of 'weight'"):
        compiled(torch.ones(2, 3))


def test_values_written_in_place_are_an_effect():
    held = State(lambda p, c: p.replace("weight", torch.ones(3, 3)))
    written = State(lambda p, c: p.tensor("weight").data.mul_(2))
    pipeline = pipeline_of(held=held, written=written, _writes={"held": ("params",), "written": ("trace",)})
    with pytest.raises(VerificationError, match=r"'written' .* effect 'params.data'"):
        thunder.jit(nn.Linear(3, 3), transforms=pipeline)


class Unmarked(tx.Plugin):
    def before_autograd(self, computation):
        return None


class Misspelt(tx.Plugin):
    @tx.hookimpl
    def before_autogrd(self, computation):
        return None


class Misread(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computaton):
        return None


class Dull(tx.Plugin):
    @tx.hookimpl(wrapper=True)
    def before_autograd(self, computation):
        return None


class Stranger:
    @tx.hookimpl
    def before_autograd(self, computation):
        return None


GIVEN = "Did you mean 'computation'? It is given computation and ctx."
YIELD = "Let it yield once, and return what that gives."
HOOKS = (
    "Did you mean 'before_autograd'? The hooks are update_model_state, guard_key, mutate_prologue, before_autograd, "
    "after_optimization, invalidate_cache, sync_gradients, discard_gradients, export_state, import_state and "
    "gradient_norm."
)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Unmarked,
            "has a method `before_autograd` that never runs, as it is not marked as a hook. Put @hookimpl above it.",
        ),
        (
            Misspelt,
            f"marks `before_autogrd` as a hook, but there is no hook of that name. {HOOKS}",
        ),
        (
            Misread,
            f"lets `before_autograd` take 'computaton', which that hook is not given. {GIVEN}",
        ),
        (
            Dull,
            f"marks `before_autograd` as a wrapper, but it does not yield. {YIELD}",
        ),
        (Stranger, "is no subclass of thunder_xform.Plugin. Derive it from that class."),
    ],
)
def test_v46_hooks_that_would_never_run_are_named_at_resolve(cls, message):
    plugin = cls() if cls is Stranger else cls(None)
    with pytest.raises(LoadError) as caught:
        pipeline_of(dummy=plugin)
    assert str(caught.value) == f"'dummy' [thunder-xform-dummy 0]: its class {cls.__name__} {message}"


def test_v46_observers_too():
    with pytest.raises(PipelineError) as caught:
        pipeline_of(dummy=tx.Plugin(None)).observe(Unmarked(None))
    assert str(caught.value).startswith("The observer Unmarked has a method `before_autograd` that never runs")


class Profiler(tx.Plugin):
    @tx.hookimpl(wrapper=True)
    def before_autograd(self, ctx):
        self.seen = [*getattr(self, "seen", ()), ctx.plugin]
        return (yield)


class Quiet(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computation):
        return None


def test_v42_a_wrapper_in_a_plugin_sees_every_plugins_calls():
    profiler = Profiler(None)
    pipeline = pipeline_of(first=Quiet(None), profiler=profiler, last=Quiet(None), bare=tx.Plugin(None))
    thunder.jit(nn.Linear(3, 3), transforms=pipeline)(torch.ones(2, 3))
    assert profiler.seen == ["first", "last"]


class Halved(Transform):
    def transform_module(self, model):
        model._overrides_buffers["mean"] = model._overrides_buffers["mean"].bfloat16()


def test_v27_a_transform_in_front_is_named():
    model = nn.Linear(3, 3)
    model.register_buffer("mean", torch.ones(3))
    with pytest.raises(PipelineError) as caught:
        thunder.jit(model, transforms=[Halved(), *pipeline_of(innocent=tx.Plugin(None))])
    assert str(caught.value) == (
        "The transform Halved in front of the pipeline leaves the model in a state that no plugin can take over: it "
        "holds the buffer 'mean' as torch.bfloat16 instead of torch.float32. Put it behind the pipeline: "
        "transforms=[*pipeline, ...]."
    )


class Trusting(tx.Plugin):
    @tx.hookimpl
    def mutate_prologue(self, prologue):
        return prologue.trust(["weight"])


def test_v39_what_a_plugin_removes_from_the_prologue_stays_removed():
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    counts = []
    for first in (tx.Plugin(None), Trusting(None)):
        compiled = thunder.jit(model, transforms=pipeline_of(first=first, last=Quiet(None)))
        torch.testing.assert_close(compiled(x), model(x))
        counts.append(str(thunder.last_prologue_traces(compiled)[-1]).count("check_tensor_shape_and_metadata("))
    assert counts[1] == counts[0] - 1
