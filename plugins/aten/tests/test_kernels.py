"""Activations, norms and splits against eager PyTorch: exactly, where kernels are the same."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import thunder_xform as tx
from thunder_xform.testing import LiveBytes, assert_same_numerics

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ACTIVATIONS = {
    "relu": (F.relu, torch.relu, nn.ReLU()),
    "gelu": (F.gelu, lambda x: F.gelu(x, approximate="tanh"), nn.GELU()),
    "silu": (F.silu, nn.SiLU()),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(like_eager, name, dtype):
    for fn in ACTIVATIONS[name]:
        x = torch.randn(4, 37, dtype=dtype) * 3
        x[0, :4] = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf])
        ran = like_eager(fn, x=x)
        assert ran.count(f"aten_{name}") == ran.count(f"aten_{name}_backward") == 1


def test_activations_in_place(like_eager):
    """V03: what changes its input in place is a value like any other."""
    ran = like_eager(lambda x: F.relu(x * 2, inplace=True) + x, x=torch.randn(4, 5))
    assert ran.count("aten_relu") == ran.count("aten_relu_backward") == 1


def test_relu_of_integers(like_eager):
    assert "aten_relu" not in like_eager(torch.relu, x=torch.arange(-3, 3))


# Where all dtypes are equal, float16 and bfloat16 included, these run PyTorch's kernel.
@pytest.mark.parametrize(
    ("trains", "dtype"),
    [(None, dtype) for dtype in DTYPES] + [({name}, torch.float32) for name in ("x", "weight", "bias")],
    ids=str,
)
def test_layer_norm(like_eager, trains, dtype):
    x = torch.randn(2, 3, 4, 5, dtype=dtype) * 2 + 1
    for shape in [(5,), (4, 5), (2, 3, 4, 5)]:
        affine = {"weight": torch.randn(shape, dtype=dtype), "bias": torch.randn(shape, dtype=dtype)}
        ran = like_eager(
            lambda x, weight, bias, shape=shape: F.layer_norm(x, shape, weight, bias, 1e-3), trains, x=x, **affine
        )
        assert ran.count("aten_layer_norm") == 1
        assert ran.count("aten_layer_norm_input_gradient") == (trains in (None, {"x"}))
        assert ran.count("aten_layer_norm_affine_gradients") == (trains != {"x"})


def test_layer_norm_without_bias_or_weight(like_eager):
    x, weight = torch.randn(3, 5), torch.randn(5)
    like_eager(lambda x: F.layer_norm(x, (5,)), x=x)
    ran = like_eager(lambda x, weight: F.layer_norm(x, (5,), weight), x=x, weight=weight)
    assert "aten_layer_norm_weight_gradient" in ran
    ran = like_eager(lambda x, bias: F.layer_norm(x, (5,), None, bias), x=x, bias=weight, atol=1e-6)
    assert "aten_layer_norm" not in ran


# Eager PyTorch has no kernel for the norm's gradient on CPU: it runs, and rounds after, each of its parts.
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [None, 1e-2])
def test_rms_norm(like_eager, eps, dtype):
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    x = torch.randn(2, 3, 4, 5, dtype=dtype) * 2 + 1
    for shape in [(5,), (4, 5), (2, 3, 4, 5)]:
        weight = torch.randn(shape, dtype=dtype)
        ran = like_eager(
            lambda x, weight, shape=shape: F.rms_norm(x, shape, weight, eps), x=x, weight=weight, **tolerance
        )
        assert {"aten_rms_norm", "aten_rms_norm_input_gradient", "aten_rms_norm_weight_gradient"} <= {*ran}
    ran = like_eager(lambda x: F.rms_norm(x, (5,), None, eps), x=x, **tolerance)
    assert "aten_rms_norm_input_gradient" in ran


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_rows_that_are_next_to_zero(like_eager, dtype):
    """All rests on eps then, which by default is that of the dtype in which rows are summed."""
    for size in (0, 1e-3):
        x = torch.full((3, 4), size, dtype=dtype)
        like_eager(lambda x: F.rms_norm(x, (4,)), x=x, atol=1e-6, rtol=5 * TOLERANCES[dtype])


@pytest.mark.parametrize("trains", [{"x"}, {"weight"}], ids=str)
def test_a_norm_computes_no_gradient_that_is_not_due(like_eager, trains):
    (only,) = trains
    ran = like_eager(
        lambda x, weight: F.rms_norm(x, (5,), weight), trains, x=torch.randn(3, 5), weight=torch.randn(5), atol=1e-6
    )
    gradients = [name for name in ran if name.endswith("_gradient")]
    assert gradients == [f"aten_rms_norm_{'input' if only == 'x' else 'weight'}_gradient"]


def test_norms_of_mixed_dtypes_are_left_to_thunder(like_eager):
    x, weight = torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(5)
    ran = like_eager(
        lambda x, weight: F.layer_norm(x.float(), (5,), weight) + F.rms_norm(x, (5,), weight),
        trains={"weight"},
        x=x,
        weight=weight,
        atol=5e-2,
        rtol=5e-2,
    )
    assert ran.count("aten_layer_norm") == 1
    assert "aten_rms_norm" not in ran


SPLITS = {
    "unbind": (lambda x: x.unbind(0), lambda x: x.unbind(-2), lambda x: torch.unbind(x, 1)),
    "chunk": (lambda x: x.chunk(2, -1), lambda x: x.chunk(3), lambda x: torch.chunk(x, 4, 1)),
    "tensor_split": (
        lambda x: x.tensor_split(3, -1),
        lambda x: torch.tensor_split(x, (2, 3), 1),
        lambda x: torch.tensor_split(x, (0, 2), 1),
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits(like_eager, name):
    """All parts, one of them, and none of the gradients of another."""
    expected = "aten_unbind" if name == "unbind" else "aten_split"
    for fn in SPLITS[name]:
        x = torch.randn(3, 4, 7)
        assert expected in like_eager(fn, x=x)
        assert expected in like_eager(lambda x, fn=fn: fn(x)[1].sin() + fn(x)[1], x=x)
        like_eager(lambda x, fn=fn: (fn(x)[0] * 2).cos(), x=x)


def test_no_gradient_is_padded_and_added_up(like_eager):
    ran = like_eager(lambda x: tuple(part.sin() for part in x.unbind(0)), x=torch.randn(3, 4))
    assert not {"torch_pad_prim_impl", "pad"} & {*ran}


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_chunks_of_any_shape(like_eager, shape, chunks, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    like_eager(lambda x: tuple(part * 2 for part in x.chunk(chunks, dim)), x=torch.randn(shape))


class Net(nn.Module):
    """Every operator, as layers, some of them frozen."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.norms = nn.ModuleList([nn.LayerNorm(24), nn.RMSNorm(24), nn.LayerNorm(24, bias=False)])
        self.norms[1].requires_grad_(False)
        self.qkv = nn.Linear(24, 72)
        self.up = nn.Linear(24, 48)
        self.down = nn.Linear(24, 24)

    def forward(self, tokens):
        x = self.norms[0](self.embedding(tokens))
        q, k, v = self.qkv(self.norms[1](x)).view(*tokens.shape, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        gate, value = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * F.relu(value)) + F.gelu(x)


def batch():
    return torch.randint(0, 11, (2, 9))


def test_a_model_in_training_evaluation_and_without_gradients():
    model = Net()
    compiled = assert_same_numerics(model, (batch(),), tx.registry.resolve(["aten"]), calls=2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x := batch()), model(x), atol=1e-6, rtol=1e-5)


def test_executors_of_the_users_choice():
    """Operators run whatever executors are listed, fusing ones between them."""
    model = Net()
    options = {"aten": {"operators": ["scaled_dot_product_attention", "relu", "rms_norm"]}}
    pipeline = tx.registry.resolve(["aten"], options=options)
    compiled = thunder.jit(model, transforms=pipeline, executors=["torchcompile"])
    x = batch()
    found, expected = compiled(x), model(x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).grad, parameter.grad, atol=1e-5, rtol=1e-5)


def test_only_the_operators_that_are_named(ran):
    pipeline = tx.registry.resolve(["aten"], options={"aten": {"operators": ["relu", "chunk"]}})
    compiled = thunder.jit(Net(), transforms=pipeline)
    compiled(batch())
    assert {name for name in ran(compiled) if name.startswith("aten_")} == {
        "aten_relu",
        "aten_relu_backward",
        "aten_split",
    }


def test_an_operator_that_is_not_there():
    with pytest.raises(tx.errors.OptionError, match=r"'scaled_dot_attention'.*'scaled_dot_product_attention'"):
        tx.registry.resolve(["aten"], options={"aten": {"operators": ["relu", "scaled_dot_attention"]}})


def test_a_function_that_contains_the_model():
    model = Net()
    pipeline = tx.registry.resolve(["aten"])
    x = batch()

    def loss(tokens):
        return model(tokens).square().mean()

    compiled = thunder.jit(loss, transforms=pipeline)
    torch.testing.assert_close(compiled(x), loss(x), atol=1e-6, rtol=1e-5)


def test_memory_of_a_step_is_that_of_eager_pytorch():
    """And below Thunder's own decompositions, which keep scores, masks and normalized rows."""
    window, width = 64, 32

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).view(4, window, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.relu(self.up(x)))

    def peak(model):
        x = torch.randn(4, window, width)
        model(x).sum().backward()
        with LiveBytes() as live:
            model(x).sum().backward()
        return live.peak

    model = nn.Sequential(*(Block() for _ in range(3)))
    eager = peak(model)
    plain, ours = (peak(thunder.jit(model, transforms=tx.registry.resolve(names))) for names in ([], ["aten"]))
    assert ours <= 1.02 * eager
    assert plain > 1.2 * ours
