"""Every option of PEFT's that the plugin has: outputs, gradients, training steps and files equal PEFT's."""

from __future__ import annotations

import pytest
import thunder
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.testing import pipeline_of


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(10, 12)
        self.o_proj = nn.Linear(12, 10, bias=False)

    def forward(self, x):
        return x + self.o_proj(torch.tanh(self.q_proj(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 9)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Nested(nn.Module):
    """Indices at two depths, as in a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.model = Net()
        self.towers = nn.ModuleList([nn.ModuleDict({"inner": Net()}) for _ in range(2)])

    def forward(self, x):
        return self.model(x) + self.towers[0]["inner"](x) + self.towers[1]["inner"](x)


CASES = {
    "use_rslora": {"use_rslora": True, "r": 4, "lora_alpha": 3},
    "patterns": {
        "rank_pattern": {"layers.1.q_proj": 3, "o_proj": 5, "q_proj|o_proj": 2},
        "alpha_pattern": {"o_proj": 5, "layers.0.q_proj": 1.5},
        "lora_alpha": 4,
    },
    "layers_to_transform": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "biases": {"bias": "all"},
    "biases of adapted layers": {"bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["head", "layers.1"]},
    "use_dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa", "r": 3, "lora_alpha": 5},
    "all at once": {
        "modules_to_save": ["norm"],
        "bias": "lora_only",
        "rank_pattern": {"o_proj": 2},
        "use_rslora": True,
        "use_dora": True,
        "layers_to_transform": 0,
        "layers_pattern": ["layers"],
        "r": 3,
    },
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_like_peft(assert_like_peft, options):
    assert_like_peft(Net(), torch.randn(4, 10), **{"target_modules": ["q_proj", "o_proj"], **options})


@pytest.mark.parametrize(
    "options",
    [
        {"layers_to_transform": 1},
        {"layers_to_transform": [0, 1], "layers_pattern": ["towers"]},
        {"layers_to_transform": [1], "layers_pattern": ["towers", "layers"]},
        {"layers_to_transform": [0], "target_modules": ["model.layers.1.q_proj", "o_proj"]},
        {"layers_to_transform": []},
    ],
)
def test_the_layers_that_peft_chooses(options):
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj"], "r": 2, **options}
    reference = get_peft_model(Nested(), LoraConfig(**options))
    theirs = [n.removeprefix("base_model.model.") for n, _ in reference.named_parameters() if "lora_A" in n]
    pipeline = tx.registry.resolve(["lora"], options={"lora": options})
    thunder.jit(Nested(), transforms=pipeline)
    assert [f"{path}.lora_A.default.weight" for path in pipeline.plugin("lora").modules] == theirs


def test_gaussian_has_the_standard_deviation_of_peft(jit):
    compiled = jit(nn.Sequential(nn.Linear(900, 20)), r=16, init_lora_weights="gaussian")
    a = dict(compiled.named_parameters())["0.lora_A.default.weight"]
    assert a.std().item() == pytest.approx(1 / 16, rel=0.03)


def test_without_initialization_adapters_are_random(jit):
    pipeline = tx.registry.resolve("lora(r=2, init_lora_weights=False)")
    compiled = thunder.jit(nn.Sequential(nn.Linear(8, 200)), transforms=pipeline)
    b = dict(compiled.named_parameters())["0.lora_B.default.weight"]
    # kaiming_uniform_(a=sqrt(5)) of a matrix with two columns: uniform within 1 / sqrt(2).
    assert b.std().item() == pytest.approx((1 / 2 / 3) ** 0.5, rel=0.1)


def test_modules_to_save_in_the_plain_model(jit):
    model, x = Net(), torch.randn(4, 10)
    compiled = jit(model, modules_to_save=["head"], r=2)
    copies = {name for name, p in compiled.named_parameters() if "modules_to_save" in name}
    assert copies == {"head.modules_to_save.default.weight", "head.modules_to_save.default.bias"}
    handle = tx.handle(compiled)
    assert copies < handle.state_dict("adapter").keys()
    before = compiled(x)
    handle.load_state_dict(handle.state_dict())
    torch.testing.assert_close(compiled(x), before, atol=1e-6, rtol=1e-6)


def test_tied_modules_to_save_are_one_copy(jit):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(7, 4)
            self.inner = nn.Linear(4, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens):
            return self.head(self.inner(self.tokens(tokens)))

    model, tokens = Tied(), torch.randint(0, 7, (3, 5))
    options = {"target_modules": ["inner"], "r": 2}
    compiled = jit(model, modules_to_save=["tokens", "head"], **options)
    copy = dict(compiled.named_parameters())["tokens.modules_to_save.default.weight"]
    compiled(tokens).sin().sum().backward()
    state = tx.handle(compiled).state_dict()
    plain = Tied()
    plain.load_state_dict(state, strict=True)
    plain(tokens).sin().sum().backward()
    torch.testing.assert_close(copy.grad, plain.tokens.weight.grad, atol=1e-6, rtol=1e-5)
    with pytest.raises(tx.errors.OptionError, match=r"'tokens.weight', which is one tensor with 'head.weight'"):
        jit(model, modules_to_save=["tokens"], **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rank_pattern": {"q_porj": 2}}, "`rank_pattern` 'q_porj' is for none of the .*Closest names: 'q_proj'"),
        ({"rank_pattern": {"q_proj": 0}}, r"'rank_pattern' of 'lora' .*Give Mapping\[str, int >= 1\]"),
        ({"rank_pattern": {"(": 2}}, r"`rank_pattern` has '\(', which is no valid regular expression"),
        ({"alpha_pattern": {"head": 2}}, "`alpha_pattern` 'head' is for none of the 4 layers"),
        ({"alpha_pattern": {"q_proj": -1}}, "'alpha_pattern' of 'lora' .*float > 0 and < inf"),
        ({"layers_to_transform": [7]}, r"in a layer of `layers_to_transform` .7.*"),
        ({"layers_to_transform": 0, "layers_pattern": "blocks"}, "`layers_pattern` 'blocks'"),
        ({"layers_pattern": "layers"}, "`layers_to_transform` is not given"),
        ({"layers_to_transform": 0, "target_modules": "all-linear"}, "goes with a list of names"),
        ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights'"),
        ({"bias": "some"}, "'none' or 'all' or 'lora_only'"),
        ({"modules_to_save": ["haed"]}, "`modules_to_save` 'haed' matches no module of Net.*'head'"),
        ({"modules_to_save": ["layers"]}, "leaves nothing of `target_modules`"),
    ],
)
def test_bad_options(options, problem):
    options = {"target_modules": ["q_proj", "o_proj"], **options}
    with pytest.raises(tx.errors.OptionError, match=problem) as caught:
        thunder.jit(Net(), transforms=tx.registry.resolve(["lora"], options={"lora": options}))
    assert caught.value.plugin == "lora"


def test_modules_with_buffers_do_not_train_whole():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    pipeline = tx.registry.resolve(["lora"], options={"lora": {"r": 2, "modules_to_save": ["1"]}})
    with pytest.raises(tx.errors.OptionError, match="matches '1', which has the buffer 'running_mean'"):
        thunder.jit(model, transforms=pipeline)


def test_dora_with_dropout():
    """Both paths, with dropout (of a probability that drops nothing) and without, give the layer's definition."""
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(3, 6)
    options = {"r": 2, "use_dora": True, "lora_dropout": 1e-12, "init_lora_weights": False, "target_modules": ["0"]}
    compiled = thunder.jit(model, transforms=tx.registry.resolve(["lora"], options={"lora": options}))
    values = {name: p.detach() for name, p in compiled.named_parameters() if "lora_" in name}
    weight = model[0].weight + 4 * values["0.lora_B.default.weight"] @ values["0.lora_A.default.weight"]
    magnitude = values["0.lora_magnitude_vector.default.weight"]
    torch.testing.assert_close(magnitude, weight.norm(dim=1).detach(), atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        magnitude.mul_(torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0]))
    expected = nn.functional.linear(x, weight * (magnitude / weight.norm(dim=1))[:, None], model[0].bias)
    for mode in (True, False):
        torch.testing.assert_close(compiled.train(mode)(x), expected, atol=1e-5, rtol=1e-5)


def test_dora_resets_and_merges(jit):
    model, x = Net(), torch.randn(3, 10)
    compiled = jit(model, use_dora=True, r=2)
    handle, separate = tx.handle(compiled), compiled(x)
    assert not torch.allclose(separate, model(x), atol=1e-3)
    handle.plugin("lora").merge()
    torch.testing.assert_close(compiled(x), separate, atol=1e-5, rtol=1e-5)
    handle.plugin("lora").unmerge()
    torch.testing.assert_close(compiled(x), separate, atol=0, rtol=0)
    handle.load_state_dict(model.state_dict())
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)


class Coded(tx.Plugin):
    @tx.hookimpl
    def update_model_state(self, params):
        params.replace("0.weight", torch.zeros(8, 8, dtype=torch.int8), layout="codes")


def test_dora_on_weights_without_a_value_is_refused():
    lora = tx.registry.resolve("lora(r=2, use_dora=True)").plugin("lora")
    with pytest.raises(tx.errors.OptionError, match="`use_dora` needs the rows of '0', which are stored as 'codes'"):
        thunder.jit(nn.Sequential(nn.Linear(8, 8)), transforms=pipeline_of(coded=Coded(None), lora=lora))


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"modules_to_save": ["1"]}, {"bias": "all"}, {"init_lora_weights": "pissa"}],
)
def test_what_starts_from_values_needs_values(options):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipeline = tx.registry.resolve(["lora"], options={"lora": {"r": 2, "target_modules": ["0"], **options}})
    with pytest.raises(tx.errors.OptionError, match="is on the meta device and has no data"):
        thunder.jit(model, transforms=pipeline)
