"""PiSSA: adapters start as the principal part of weights, as PEFT's do. (Training and files: test_options.py.)"""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import thunder_xform as tx
from thunder_xform_lora import load_peft, peft_options, save_peft

OPTIONS = {"r": 2, "lora_alpha": 3, "init_lora_weights": "pissa"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.words = nn.Embedding(9, 6)
        self.first = nn.Linear(6, 8)
        self.last = Conv1D(4, 8)

    def forward(self, tokens):
        return self.last(torch.tanh(self.first(self.words(tokens))))


def compiled_of(model, **options):
    options = {**OPTIONS, "target_modules": ["words", "first", "last"], **options}
    return thunder.jit(model, transforms=tx.registry.resolve(["lora"], options={"lora": options}))


@pytest.mark.parametrize("dora", [False, True])
def test_weights_and_adapters_start_as_pefts(dora):
    model, tokens = Net(), torch.randint(0, 9, (3, 4))
    plain = copy.deepcopy(model.state_dict())
    compiled = compiled_of(model, use_dora=dora)
    targets = ["words", "first", "last"]
    reference = get_peft_model(copy.deepcopy(model), LoraConfig(**OPTIONS, target_modules=targets, use_dora=dora))
    ours, theirs = dict(compiled.named_parameters()), dict(reference.named_parameters())
    for name in ("first", "last"):
        wanted = theirs[f"base_model.model.{name}.base_layer.weight"]
        torch.testing.assert_close(ours[f"{name}.weight"], wanted, atol=1e-6, rtol=0)
        for part in ("lora_A", "lora_B") + ("lora_magnitude_vector",) * dora:
            key = f"{name}.{part}.default.weight"
            torch.testing.assert_close(ours[key], theirs[f"base_model.model.{key}"], atol=1e-6, rtol=0)
    # Nothing is lost at first, and the user's module is as it was.
    torch.testing.assert_close(compiled(tokens), model(tokens), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.state_dict(), plain, atol=0, rtol=0)
    torch.testing.assert_close(tx.handle(compiled).state_dict(), dict(plain), atol=1e-6, rtol=0)


def test_full_states_are_decomposed_again(tmp_path):
    """What is saved for PEFT then goes with the model that the state is of."""
    other, tokens = Net(), torch.randint(0, 9, (3, 4))
    compiled = compiled_of(Net())
    handle = tx.handle(compiled)
    handle.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(tokens), other(tokens), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        handle.parameters["first.lora_B.default.weight"].mul_(3)
    save_peft(handle, tmp_path)
    assert peft_options(tmp_path)["init_lora_weights"] == "pissa"
    again = compiled_of(other)
    load_peft(tx.handle(again), tmp_path)
    torch.testing.assert_close(again(tokens), compiled(tokens), atol=1e-5, rtol=1e-5)
    with pytest.raises(tx.errors.CheckpointError, match="init_lora_weights='pissa', but the model has True"):
        load_peft(tx.handle(compiled_of(other, init_lora_weights=True)), tmp_path)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.words.weight


@pytest.mark.parametrize(
    ("model", "request_", "problem"),
    [
        (Tied(), "lora(r=2, init_lora_weights='pissa')", "weights of 'head', which are those of 'words', too"),
        (
            nn.Sequential(nn.Conv1d(4, 4, 3)),
            "lora(r=2, init_lora_weights='pissa', target_modules=['0'])",
            "convolution",
        ),
        (
            nn.Sequential(nn.Linear(8, 8)),
            "quant(scheme='int8') + lora(r=2, init_lora_weights='pissa')",
            r"weights of '0', which are stored as 'int8\(\)'",
        ),
        (nn.Linear(8, 8), "lora(init_lora_weights='pissa', adapters=['a', 'b'])", "there can be one only"),
    ],
    ids=["tied", "convolution", "quantized", "two adapters"],
)
def test_what_cannot_be_decomposed_is_refused(model, request_, problem):
    if "quant" in request_:
        pytest.importorskip("thunder_xform_quant", reason="needs the plugin quant")
    with pytest.raises(tx.errors.OptionError, match=problem):
        thunder.jit(model, transforms=tx.registry.resolve(request_))
