"""Which layers get adapters: PEFT's rules, and errors that name what is there."""

from __future__ import annotations

import pytest
import thunder
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

import thunder_xform as tx


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.v_proj = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.block = Block()
        self.head = nn.Linear(4, 5)


MODEL = Net()
LINEAR = [path for path, module in MODEL.named_modules() if isinstance(module, nn.Linear)]


def adapted(model=MODEL, **options):
    """Names of the layers that get adapters."""
    compiled = thunder.jit(model, transforms=tx.registry.resolve(["lora"], options={"lora": {"r": 2, **options}}))
    names = [name for name, _ in compiled.named_parameters() if "lora_A" in name]
    return [name.rpartition(".lora_A.")[0] for name in names]


def test_all_linear_layers_by_default():
    assert adapted() == LINEAR
    assert adapted(target_modules="All-Linear") == LINEAR


def test_all_linear_leaves_out_the_output_layer_that_a_model_names():
    class LanguageModel(Net):
        def get_output_embeddings(self):
            return self.head

    assert adapted(LanguageModel()) == [path for path in LINEAR if path != "head"]
    assert "head" in adapted(LanguageModel(), target_modules=["head", "q_proj"])


def _suffixes():
    parts = [path.split(".") for path in LINEAR]
    return sorted({".".join(p[i:]) for p in parts for i in range(len(p))})


NAMES = st.lists(st.sampled_from(_suffixes()), min_size=1, max_size=4, unique=True)
REGEXES = st.sampled_from(
    [
        r".*\.(q|v)_proj",
        r"blocks\.0\..*_proj",
        r".*proj",
        r"block.*\.mlp\.[02]",
        r"head|.*\.2",
        r"(.+\.)?q_proj",
    ]
)


@settings(max_examples=60, deadline=None)
@given(target=st.one_of(NAMES, REGEXES), exclude=st.one_of(st.none(), NAMES, REGEXES))
def test_the_same_layers_as_peft(target, exclude):
    config = LoraConfig(target_modules=target, exclude_modules=exclude)
    matched = [p for p, _ in MODEL.named_modules() if check_target_module_exists(config, p)]
    if not set(matched) <= set(LINEAR):
        with pytest.raises(tx.errors.OptionError, match=r"but only torch.nn.Linear, Embedding, .* can have an adapter"):
            adapted(target_modules=target, exclude_modules=exclude)
    elif matched:
        assert adapted(target_modules=target, exclude_modules=exclude) == matched
    else:
        with pytest.raises(tx.errors.OptionError, match="leaves nothing of `target_modules`"):
            adapted(target_modules=target, exclude_modules=exclude)


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        ({"target_modules": ["q_porj"]}, "`target_modules` 'q_porj' matches no module of Net.", "'q_proj'"),
        ({"target_modules": ["q_proj", "w_proj"]}, "`target_modules` 'w_proj' matches", "'v_proj', 'q_proj'"),
        ({"target_modules": "blocks.0.q"}, "`target_modules` 'blocks.0.q' matches", "'blocks.0.q_proj'"),
        ({"target_modules": "all-liner"}, "`target_modules` 'all-liner' matches", "'all-linear'"),
        ({"exclude_modules": ["haed"]}, "`exclude_modules` 'haed' matches", "'head'"),
        (
            {"target_modules": ["mlp"]},
            "matches 'blocks.0.mlp' of type Sequential, but only torch.nn.Linear, Embedding,",
            r"exclude_modules=\['blocks.0.mlp'\]",
        ),
        (
            {"target_modules": r".*mlp.*"},
            r"matches 'blocks.0.mlp' of type Sequential",
            "Name such layers only",
        ),
        ({"exclude_modules": r".*"}, "leaves nothing of `target_modules` 'all-linear'", "Exclude less"),
        ({"target_modules": []}, "`target_modules` is empty", ""),
        ({"target_modules": "(q"}, r"`target_modules` is '\(q', .* regular expression", ""),
        ({"exclude_modules": "*"}, r"`exclude_modules` is '\*', .* regular expression", ""),
        ({"target_modules": [1]}, r"'target_modules'.* is .1.", ""),
        ({"lora_alpha": 0}, "'lora_alpha' of 'lora' .* is 0,", "Give float > 0 and < inf"),
        ({"lora_alpha": float("nan")}, "'lora_alpha' of 'lora' .* is nan,", ""),
        ({"lora_dropout": 1.0}, "'lora_dropout' .* is 1.0", "Give float >= 0 and < 1"),
        ({"lora_dropout": -0.1}, "'lora_dropout' .* is -0.1", ""),
        ({"target_module": ["head"]}, "no option 'target_module'. Did you mean 'target_modules'", ""),
        ({"use_qalora": True}, "no option 'use_qalora'", ""),
    ],
)
def test_u23_bad_options_change_nothing(options, problem, remedy):
    before = {name: (p, p.detach().clone(), p.requires_grad) for name, p in MODEL.named_parameters()}
    with pytest.raises((tx.errors.OptionError, tx.errors.UnknownOptionError), match=problem) as caught:
        adapted(**options)
    assert caught.value.plugin == "lora"
    with pytest.raises((tx.errors.OptionError, tx.errors.UnknownOptionError), match=remedy):
        adapted(**options)
    after = dict(MODEL.named_parameters())
    assert after.keys() == before.keys()
    for name, (parameter, value, requires_grad) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, value)
        assert parameter.requires_grad == requires_grad


def test_a_model_without_linear_layers():
    with pytest.raises(tx.errors.OptionError, match=r"Embedding has no torch.nn.Linear"):
        adapted(nn.Embedding(3, 4))


def test_options_are_immutable_and_stand_in_a_request():
    from thunder_xform_lora import Options

    options = Options(r=3, target_modules=["head"])
    assert options.target_modules == ("head",)
    with pytest.raises(AttributeError):
        options.r = 4
    assert tx.registry.resolve([options]).plugin("lora").options == options
