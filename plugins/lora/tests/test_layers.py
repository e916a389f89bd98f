"""U07: layers and options that Thunder 0.2.6's LoRA gets wrong, each against PEFT or eager PyTorch."""

from __future__ import annotations

import pytest
import thunder
import torch
from torch import nn
from torch.nn import functional as F

import thunder_xform as tx


def adapters(compiled):
    return {name: p for name, p in compiled.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 5), (5, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_u07_non_square(jit, peft_of, shape, bias):
    model = nn.Sequential(nn.Linear(*shape, bias=bias))
    options = {"r": min(*shape, 2), "target_modules": ["0"]}
    compiled = jit(model, **options)
    x = torch.randn(3, shape[0], requires_grad=True)
    y = torch.randn(3, shape[0], requires_grad=True)
    y.data.copy_(x.data)
    ours, theirs = compiled(x), peft_of(model, compiled, **options)(y)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", ["all-linear", [""], ".*"])
def test_u07_root_linear(jit, target):
    model = nn.Linear(4, 6)
    compiled = jit(model, r=2, lora_alpha=3, target_modules=target)
    assert set(adapters(compiled)) == {"lora_A.default.weight", "lora_B.default.weight"}
    a, b = adapters(compiled).values()
    x = torch.randn(3, 4)
    expected = F.linear(x, model.weight + 1.5 * b @ a, model.bias)
    torch.testing.assert_close(compiled(x), expected, atol=1e-6, rtol=1e-6)
    expected.sin().sum().backward()
    wanted = a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    compiled(x).sin().sum().backward()
    torch.testing.assert_close((a.grad, b.grad), wanted, atol=1e-6, rtol=1e-5)


def test_u07_batched_and_vector_inputs(jit, peft_of):
    model = nn.Sequential(nn.Linear(4, 6))
    options = {"r": 2, "target_modules": ["0"]}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)
    for shape in ((4,), (2, 4), (2, 3, 4), (0, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), reference(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("r", [0, -1, 1.5, True, "8", None])
def test_u07_rank_that_is_none(r):
    with pytest.raises(tx.errors.OptionError, match=r"`?'?r'?`?"):
        tx.registry.resolve(["lora"], options={"lora": {"r": r}})


def test_u07_rank_zero_says_what_a_rank_is():
    with pytest.raises(tx.errors.OptionError, match=r"is 0, which it does not take\. Give int >= 1\."):
        tx.registry.resolve(["lora"], options={"lora": {"r": 0}})


def test_a_rank_larger_than_the_layer_has_no_principal_part():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    with pytest.raises(tx.errors.OptionError) as caught:
        thunder.jit(model, transforms=tx.registry.resolve("lora(r=5, init_lora_weights='pissa')"))
    assert str(caught.value) == (
        "`r` is 5, but '0' maps 4 to 6 features, and its weight has no more than 4 principal components. "
        "Lower `r` to 4 or exclude the layer with exclude_modules=['0']."
    )
    assert (caught.value.plugin, caught.value.option, caught.value.value) == ("lora", "r", "5")
    assert caught.value.distribution == "thunder-xform-lora"


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 9)

    def forward(self, x):
        return self.used(x)


def test_u07_unused_linear(jit, peft_of):
    model = Unused()
    options = {"r": 2, "target_modules": "all-linear"}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)
    x = torch.randn(3, 4)
    out = compiled(x)
    torch.testing.assert_close(out, reference(x), atol=1e-6, rtol=1e-6)
    out.sum().backward()
    assert {n for n, p in adapters(compiled).items() if p.grad is not None} == {
        "used.lora_A.default.weight",
        "used.lora_B.default.weight",
    }


class TiedLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_u07_tied_linears_have_one_pair(jit):
    model = TiedLinears()
    compiled = jit(model, r=2, lora_alpha=2)
    assert list(adapters(compiled)) == ["first.lora_A.default.weight", "first.lora_B.default.weight"]
    a, b = adapters(compiled).values()
    x = torch.randn(3, 4)
    weight = model.first.weight + b @ a
    expected = F.linear(torch.tanh(F.linear(x, weight, model.first.bias)), weight)
    gradients = torch.autograd.grad(expected.sin().sum(), (a, b))
    out = compiled(x)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    out.sin().sum().backward()
    torch.testing.assert_close((a.grad, b.grad), gradients, atol=1e-6, rtol=1e-5)


def test_one_of_two_tied_linears_is_refused():
    pipeline = tx.registry.resolve(["lora"], options={"lora": {"r": 2, "target_modules": ["first"]}})
    with pytest.raises(tx.errors.OptionError, match="'first' and 'second' share one weight"):
        thunder.jit(TiedLinears(), transforms=pipeline)


class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.tokens(tokens)))


def test_u07_tied_embedding_keeps_its_values(jit, peft_of):
    model = TiedEmbedding()
    options = {"r": 2, "target_modules": ["head"]}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)
    tokens = torch.randint(0, 7, (2, 5))
    ours, theirs = compiled(tokens), reference(tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    ours.sin().sum().backward()
    theirs.sin().sum().backward()
    for name, parameter in adapters(compiled).items():
        wanted = reference.get_parameter(f"base_model.model.{name}").grad
        torch.testing.assert_close(parameter.grad, wanted, atol=1e-6, rtol=1e-5)


def test_u07_eval_turns_dropout_off(jit, peft_of):
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    options = {"r": 2, "lora_dropout": 0.5, "target_modules": "all-linear"}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options).eval()
    x = torch.randn(3, 6)
    assert not torch.equal(compiled.train()(x), compiled(x))
    compiled.eval()
    torch.testing.assert_close(compiled(x), reference(x), atol=1e-6, rtol=1e-6)
    assert torch.equal(compiled(x), compiled(x))


def test_dropout_zeroes_inputs_of_the_adapter_only(jit):
    """With W = 0 and A = B = I, the output is the dropped input times the scaling, and so is the gradient."""
    model = nn.Linear(64, 64, bias=False)
    compiled = jit(model, r=64, lora_alpha=32, lora_dropout=0.25)
    with torch.no_grad():
        model.weight.zero_()
        for parameter in adapters(compiled).values():
            parameter.copy_(torch.eye(64))
    x = torch.rand(200, 64).add(0.5).requires_grad_()
    out = compiled.train()(x)
    kept = out != 0
    torch.testing.assert_close(out[kept], (x * 0.5 / 0.75)[kept], atol=1e-6, rtol=1e-6)
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.02)
    out.sum().backward()
    torch.testing.assert_close(x.grad, kept * 0.5 / 0.75, atol=1e-6, rtol=1e-6)


def test_weight_that_no_linear_operation_applies_is_refused():
    class Transposed(nn.Linear):
        def forward(self, x):
            return x @ self.weight.transpose(0, 1)

    compiled = thunder.jit(nn.Sequential(Transposed(4, 4)), transforms=tx.registry.resolve("lora(r=2)"))
    with pytest.raises(tx.errors.PipelineError, match="the weight of '0' in other operations"):
        compiled(torch.randn(2, 4))


def test_parametrized_weight_is_refused():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(tx.errors.OptionError, match="The weight of '0' is computed from other parameters"):
        thunder.jit(model, transforms=tx.registry.resolve("lora(r=2)"))
