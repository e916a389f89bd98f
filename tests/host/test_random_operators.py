"""V05: what draws random numbers draws them once, for forward and backward, however the region is recomputed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import thunder_xform as tx
from thunder_xform.errors import PipelineError
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip

noise = tx.operator(
    "test_random_noise",
    meta=lambda t: tx.tensor_like(t, requires_grad=False),
    fn=torch.rand_like,
    backward=lambda inputs, outputs, gradients: (None,),
    random=True,
)
effect = tx.operator("test_random_effect", meta=lambda t: tx.tensor_like(t), fn=torch.clone, side_effects=True)


class Scaled(nn.Module):
    """Its result tells the random factor, so the exact gradient is known: y = exp(w x k), dy/dw = y log(y) / w."""

    def __init__(self, draw, region=False):
        super().__init__()
        self.w = nn.Parameter(torch.rand(64) + 0.5)
        self.draw = draw
        self.region = region

    def inner(self, x):
        return torch.exp(self.draw(self.w * x))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.region else self.inner(x)


class Recompute(tx.Plugin):
    def __init__(self, which=lambda op: True):
        super().__init__(None)
        self.which = which

    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        return computation.recompute(self.which)


class Same(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        return computation.rewrite(lambda op: True, lambda op, edit: op.call())


class Noisy(tx.Plugin):
    """A stranger's random operator, recomputed with everything else."""

    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        noisy = computation.rewrite("mul", lambda op, edit: (lambda out: out * noise(out))(op.call()))
        assert [op.random for op in noisy.operations() if op.name == noise.name] == [True, True]
        return noisy.recompute(lambda op: True)


DRAWS = {
    "dropout": lambda t: F.dropout(t, 0.5),
    "rand_like": lambda t: t * torch.rand_like(t),
    "bernoulli": lambda t: t * torch.bernoulli(torch.full_like(t, 0.5)),
    "randn": lambda t: t * torch.randn(16, 64),
    "randint": lambda t: t * torch.randint(0, 2, (16, 64)),
}


def exact(model, plugins):
    x = torch.rand(16, 64) + 0.1
    compiled = thunder.jit(model, transforms=pipeline_of(**plugins))
    y = compiled(x)
    y.sum().backward()
    wanted = (y * torch.log(y) / model.w).sum(0).detach()
    torch.testing.assert_close(dict(compiled.named_parameters())["w"].grad, wanted, atol=1e-4, rtol=1e-4)
    return thunder.last_traces(compiled)[-1]


@pytest.mark.parametrize("name", DRAWS)
def test_a_checkpointed_region_has_one_mask(name):
    exact(Scaled(DRAWS[name], region=True), {"noop": tx.Plugin(None)})
    exact(Scaled(DRAWS[name], region=True), {"same": Same(None)})


@pytest.mark.parametrize("plugins", [{"remat": Recompute()}, {"remat": Recompute(), "same": Same(None)}])
def test_a_dropout_that_a_plugin_recomputes_has_one_mask_of_which_only_the_bits_are_kept(plugins):
    forward = exact(Scaled(DRAWS["dropout"]), plugins)
    kept = [p for p in forward.bound_symbols[-1].args[1][0] if p.name not in {a.name for a in forward.args}]
    assert [(str(p.dtype), tuple(p.shape)) for p in kept] == [("thunder.dtypes.bool8", (16, 64))]


def test_a_strangers_random_operator_keeps_its_numbers():
    exact(Scaled(lambda t: t * 1.0), {"noisy": Noisy(None)})


def test_attention_with_dropout_is_recomputed_with_one_mask():
    """With the identity for values the output is the dropped-out attention itself, times w."""

    class Values(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x, eye):
            value = eye * self.w

            def attend(v):
                return F.scaled_dot_product_attention(x, x, v, dropout_p=0.5)

            return checkpoint(attend, value, use_reentrant=False)

    model, x = Values(), torch.randn(1, 1, 8, 8)
    eye = torch.eye(8).expand(1, 1, 8, 8).contiguous()
    compiled = thunder.jit(model, transforms=pipeline_of(noop=tx.Plugin(None)))
    y = compiled(x, eye)
    y.sum().backward()
    torch.testing.assert_close(dict(compiled.named_parameters())["w"].grad, y.detach().sum((0, 1, 2)))


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("alpha_dropout", nn.AlphaDropout()),
        ("feature_alpha_dropout", nn.FeatureAlphaDropout()),
        ("dropout1d", nn.Dropout1d()),
        ("dropout2d", nn.Dropout2d()),
    ],
)
def test_dropouts_whose_gradient_thunder_draws_anew_are_refused_in_training_alone(name, module):
    model = nn.Sequential(nn.Linear(4, 4), module)
    x = torch.randn(2, 3, 4, 4)[0 if name == "dropout1d" else slice(None)]
    compiled = thunder.jit(model, transforms=pipeline_of(noop=tx.Plugin(None)))
    with pytest.raises(PipelineError) as caught:
        compiled(x)
    assert str(caught.value) == (
        f"torch.nn.functional.{name} in module '1' would draw other random numbers in the backward than in the "
        "forward, so that its gradients would be wrong. Use torch.nn.functional.dropout, or call it where no gradient "
        "flows."
    )
    with torch.no_grad():
        compiled(x)
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))


def test_an_operator_with_side_effects_is_not_recomputed():
    class Effect(tx.Plugin):
        @tx.hookimpl
        def before_autograd(self, computation, ctx):
            return computation.rewrite("mul", lambda op, edit: effect(op.call())).recompute(lambda op: True)

    compiled = thunder.jit(Scaled(lambda t: t + 1), transforms=pipeline_of(effect=Effect(None)))
    with pytest.raises(PipelineError) as caught:
        compiled(torch.rand(16, 64))
    assert str(caught.value) == (
        "Cannot recompute 'test_random_effect' in the backward: it has side effects, or what it does is unknown. "
        "Leave it out."
    )
