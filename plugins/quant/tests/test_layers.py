"""Which weights are packed, what the compiled model computes with them, and what is refused."""

from __future__ import annotations

import copy
import importlib
import sys

import pytest
import torch
from torch import nn

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.testing import pipeline_of
from thunder_xform_quant import Packed, Scheme
from thunder_xform_quant.options import Options
from thunder_xform_quant.plugin import Quant

TOLERANCE = {"atol": 1e-6, "rtol": 1e-5}


class Tied(nn.Module):
    """An output layer that shares the embedding's weight, and a layer that goes by the name of one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(9, 64, dtype=dtype)
        self.up = nn.Linear(64, 30, dtype=dtype)
        self.down = nn.Linear(30, 64, bias=False, dtype=dtype)
        self.output = nn.Linear(64, 9, bias=False, dtype=dtype)
        self.output.weight = self.embedding.weight
        self.lm_head = nn.Linear(9, 5, dtype=dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.lm_head(self.output(x + self.down(torch.relu(self.up(x)))))


class Unusual(nn.Module):
    """Uses the weight of a linear layer in the layer and elsewhere."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(x) @ self.inner.weight + self.inner.weight.sum(0)


def dequantized(model, compiled, *, frozen=()):
    """Eager copy of ``model`` with the weights that the compiled one says it computes with."""
    plain = copy.deepcopy(model)
    plain.load_state_dict(tx.handle(compiled).state_dict())
    for name in frozen:
        plain.get_parameter(name).requires_grad_(False)
    return plain


def int8(weight):
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step).round() * step


def packed_names(compiled):
    return {n for n, p in tx.handle(compiled).parameters.items() if not p.is_floating_point()}


def agree(compiled, plain, *inputs, **tolerance):
    """Outputs and gradients, of whatever trains, of the compiled model and of an eager one."""
    expected = plain(*inputs)
    expected.float().square().mean().backward()
    found = compiled(*inputs)
    assert found.dtype == expected.dtype
    found.float().square().mean().backward()
    tolerance = tolerance or TOLERANCE
    torch.testing.assert_close(found, expected, **tolerance)
    gradients = dict(plain.named_parameters())
    compared = 0
    for name, parameter in tx.handle(compiled).parameters.items():
        if parameter.requires_grad:
            # bitsandbytes turns a bias, and so its gradient, to the compute dtype.
            torch.testing.assert_close(parameter.grad, gradients[name].grad, check_dtype=False, **tolerance)
            compared += 1
    return compared


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_all_linear_leaves_embeddings_ties_and_the_output_layer_alone(jit, scheme):
    model, tokens = Tied(), torch.randint(0, 9, (3, 4))
    before = copy.deepcopy(model)
    compiled = jit(model, "quant", quant={"scheme": scheme})
    assert packed_names(compiled) == {"up.weight", "down.weight"}
    plain = dequantized(before, compiled, frozen=("up.weight", "down.weight"))
    assert agree(compiled, plain, tokens) == 4  # the shared embedding, and the biases and weight left
    for (name, tensor), old in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(tensor, old), name
    assert model.up.weight.requires_grad
    assert model.up.weight.grad is None


def test_what_int8_computes_with_is_defined(jit):
    model = Tied()
    state = tx.handle(jit(model, "quant", quant={"scheme": "int8"})).state_dict()
    for name in ("up.weight", "down.weight"):
        torch.testing.assert_close(state[name], int8(model.get_parameter(name)), atol=0, rtol=1e-6)
    assert torch.equal(state["lm_head.weight"], model.lm_head.weight)
    assert state.keys() == model.state_dict().keys()


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [False, True])
def test_outputs_and_gradients_are_those_of_linear4bit(jit, in_four_bits, quant_type, double_quant):
    model = nn.Sequential(nn.Linear(5, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 7, bias=False))
    plain = in_four_bits(model, quant_type, double_quant, ("1", "3"))
    options = {"scheme": quant_type, "double_quant": double_quant, "exclude_modules": ["0"]}
    compiled = jit(model, "quant", quant=options)
    # float32 and equal arithmetic: bitwise but for the order of sums in bias gradients.
    assert agree(compiled, plain, torch.randn(3, 5)) == 3


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_those_of_linear4bit(jit, in_four_bits, dtype, compute_dtype):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128)).to(dtype)
    compute = getattr(torch, compute_dtype) if compute_dtype else None
    plain = in_four_bits(model, "nf4", False, ("1",), compute_dtype=compute)
    compiled = jit(model, "quant", quant={"compute_dtype": compute_dtype, "target_modules": ["1"]})
    tolerance = TOLERANCE if dtype == torch.float32 and compute is None else {"atol": 2e-3, "rtol": 2e-2}
    assert agree(compiled, plain, torch.randn(3, 64).to(dtype), **tolerance) == 3


def test_float64_models_compute_in_float64(jit):
    model, tokens = Tied(torch.float64), torch.randint(0, 9, (3, 4))
    compiled = jit(model, "quant")
    plain = dequantized(model, compiled, frozen=("up.weight", "down.weight"))
    agree(compiled, plain, tokens, atol=1e-12, rtol=1e-12)


def test_autocast_casts_as_it_does_for_the_plain_layer(jit):
    model, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), torch.randn(3, 64)
    compiled = jit(model, "quant", quant={"target_modules": ["0"]})
    plain = dequantized(model, compiled, frozen=("0.weight",))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(x), compiled(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=2e-2)


def test_a_weight_that_is_read_elsewhere_too(jit):
    model = nn.Sequential(nn.Linear(3, 64), Unusual())
    compiled = jit(model, "quant", quant={"target_modules": ["inner"]})
    plain = dequantized(model, compiled, frozen=("1.inner.weight",))
    assert agree(compiled, plain, torch.randn(4, 3), atol=1e-5, rtol=1e-5) == 3


def test_a_root_linear_a_single_row_and_no_gradients(jit):
    model = nn.Linear(64, 4)
    compiled = jit(model, "quant", quant={"scheme": "int8"})
    x = torch.randn(64)
    plain = dequantized(model, compiled, frozen=("weight",))
    assert agree(compiled, plain, x) == 1
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x), **TOLERANCE)
    frozen = jit(nn.Linear(64, 4, bias=False), "quant")
    assert not frozen(x).requires_grad


def test_two_linear_layers_that_share_a_weight_are_packed_once(jit):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    compiled = jit(model, "quant")
    assert packed_names(compiled) == {"0.weight"}
    plain = dequantized(model, compiled, frozen=("0.weight",))
    assert agree(compiled, plain, torch.randn(2, 64)) == 1


def test_memory_of_released_originals(jit):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256))
    compiled = jit(model, "quant", quant={"double_quant": True, "release_originals": True})
    assert model[0].weight.is_meta
    assert not model[1].bias.is_meta
    held = sum(t.nbytes for n, t in tx.handle(compiled).state_dict("sharded").items() if "bias" not in n)
    assert held < 2 * 256 * 256 * 4.2 / 8
    assert compiled(torch.randn(2, 256)).shape == (2, 256)


# -- state -----------------------------------------------------------------------------------------------------------


def test_states_round_trip_and_a_plain_state_is_quantized(jit):
    first, second, x = nn.Linear(64, 6), nn.Linear(64, 6), torch.randn(2, 64)
    ours, theirs = (tx.handle(jit(m, "quant", quant={"double_quant": True})) for m in (first, second))
    packed = ours.state_dict("sharded")
    names = {"weight", "bias", *(f"weight.{part}" for part in ("absmax", "nested_absmax", "nested_offset"))}
    assert packed.keys() == names
    copied = {name: tensor.clone() for name, tensor in packed.items()}
    theirs.load_state_dict(first.state_dict())
    for name, tensor in theirs.state_dict("sharded").items():
        assert torch.equal(tensor, copied[name]), name
    third = jit(nn.Linear(64, 6), "quant", quant={"double_quant": True})
    tx.handle(third).load_state_dict(copied, kind="sharded")
    plain = nn.Linear(64, 6)
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(third(x), plain(x), **TOLERANCE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_cannot_be_quantized_changes_nothing(jit, value):
    handle = tx.handle(jit(nn.Linear(64, 6), "quant"))
    before = {name: tensor.clone() for name, tensor in handle.state_dict("sharded").items()}
    bad = nn.Linear(64, 6).state_dict()
    bad["weight"][2, 2] = value
    with pytest.raises(tx.errors.CheckpointError, match=r"'weight' .* infinite or NaN"):
        handle.load_state_dict(bad)
    integral = {"weight": torch.zeros(6, 64, dtype=torch.long), "bias": torch.zeros(6)}
    with pytest.raises(tx.errors.CheckpointError, match=r"'weight' .* torch.int64"):
        handle.load_state_dict(integral)
    for name, tensor in handle.state_dict("sharded").items():
        assert torch.equal(tensor, before[name])


# -- what is refused -------------------------------------------------------------------------------------------------


def on_meta(model):
    return model.to("meta")


def with_nan(model):
    model.down.weight.data[0, 0] = float("nan")
    return model


REFUSED = {
    "misspelt": ({"target_modules": ["upp"]}, r"'upp' matches no module of Tied. Closest names: 'up'"),
    "misspelt exclusion": ({"exclude_modules": ["dwn"]}, r"`exclude_modules` 'dwn' .* 'down'"),
    "no linear layer": ({"target_modules": ["embedding"]}, r"'embedding' of type Embedding"),
    "nothing left": ({"exclude_modules": ".*"}, "Tied has no torch.nn.Linear that"),
    "tied to an embedding": ({"target_modules": ["output"]}, "'output' and 'embedding' share one weight"),
    "scheme": ({"scheme": "nf5"}, r"no scheme 'nf5'. Did you mean 'nf4'"),
    "scheme's module": ({"scheme": "nowhere.at:All"}, r"'nowhere.at:All' cannot be imported"),
    "scheme's class": ({"scheme": "collections:OrderedDict"}, "'collections:OrderedDict' is no subclass of"),
    "block size": ({"blocksize": 48}, r"`blocksize` is 48; it is one of 32, 64"),
    "setting of another scheme": ({"scheme": "int8", "double_quant": True}, "'int8' takes no `double_quant`"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_fit_the_model(jit, options, message):
    with pytest.raises(tx.errors.OptionError, match=message) as caught:
        jit(Tied(), "quant", quant=options)
    assert (caught.value.plugin, caught.value.distribution) == ("quant", "thunder-xform-quant")


@pytest.mark.parametrize("options", [{"scheme": ""}, {"compute_dtype": "int8"}, {"target_modules": "("}], ids=str)
def test_options_that_fit_no_model(options):
    with pytest.raises(tx.errors.OptionError):
        tx.registry.resolve(["quant"], options={"quant": options})


@pytest.mark.parametrize(
    ("spoil", "message"), [(on_meta, "'up.weight', which has no data"), (with_nan, "'down.weight': it has entries")]
)
def test_weights_that_cannot_be_quantized(jit, spoil, message):
    with pytest.raises(tx.errors.PipelineError, match=message):
        jit(spoil(Tied()), "quant")


def test_without_bitsandbytes_the_error_says_how_to_get_it(jit, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(tx.errors.OptionError, match=r"pip install 'thunder-xform-quant\[bitsandbytes\]'"):
        jit(Tied(), "quant")
    compiled = jit(Tied(), "quant", quant={"scheme": "int8"})
    assert packed_names(compiled) == {"up.weight", "down.weight"}


# -- schemes of others -----------------------------------------------------------------------------------------------


class Signs(Scheme):
    """The sign of every entry, and the mean magnitude of the row."""

    def __init__(self, blocksize=1):
        self._blocksize = blocksize

    def __repr__(self):
        return "signs()"

    def quantize(self, weight):
        return Packed(weight.sign().to(torch.int8), {"mean": weight.abs().mean(1)})

    def dequantize(self, packed, shape, dtype):
        return (packed.codes * packed.rows["mean"][:, None]).to(dtype)


class Publisher(tx.Plugin):
    def __init__(self, schemes):
        super().__init__(None)
        self.quant_schemes = schemes


def test_a_scheme_by_module_and_class(jit):
    # The module's name depends on how pytest imports it.
    name = Signs.__module__
    assert importlib.import_module(name).Signs is Signs
    model = nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 5))
    compiled = jit(model, "quant", quant={"scheme": f"{name}:Signs", "target_modules": ["1"], "blocksize": 2})
    plain = copy.deepcopy(model)
    weight = model[1].weight
    plain[1].weight = nn.Parameter(weight.sign() * weight.abs().mean(1, keepdim=True), requires_grad=False)
    assert agree(compiled, plain, torch.randn(2, 3)) == 3


def test_a_scheme_of_another_plugin_in_the_pipeline():
    quant = Quant(Options(scheme="signs"))
    pipeline = pipeline_of(publisher=Publisher({"signs": Signs}), quant=quant)
    model = nn.Linear(64, 5)
    compiled = thunder.jit(model, transforms=pipeline)
    expected = model.weight.sign() * model.weight.abs().mean(1, keepdim=True)
    torch.testing.assert_close(tx.handle(compiled).state_dict()["weight"], expected.detach())
    clash = pipeline_of(publisher=Publisher({"nf4": Signs}), quant=Quant(Options()))
    with pytest.raises(tx.errors.OptionError, match="'nf4' of plugin 'publisher' is one of 'quant', too"):
        thunder.jit(nn.Linear(64, 5), transforms=clash)
