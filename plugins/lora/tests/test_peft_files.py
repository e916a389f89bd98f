"""Adapters in PEFT's files, both directions; bad files change nothing."""

from __future__ import annotations

import copy
import json

import pytest
import thunder
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import thunder_xform as tx
from thunder_xform_lora import load_peft, peft_options, save_peft


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 12)
        self.middle = nn.Linear(12, 12, bias=False)
        self.last = nn.Linear(12, 9)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


CASES = {
    "defaults": {"target_modules": "all-linear"},
    "names": {"r": 3, "lora_alpha": 5, "target_modules": ["first", "last"], "lora_dropout": 0.25},
    "pattern": {"r": 2, "target_modules": "(middle|last)", "exclude_modules": ["last"]},
}


def loaded(model, folder):
    """The model compiled with the adapter in a folder, as a user would."""
    pipeline = tx.registry.resolve(["lora"], options={"lora": peft_options(folder)})
    compiled = thunder.jit(model, transforms=pipeline)
    load_peft(tx.handle(compiled), folder)
    return compiled


def trained_by_peft(model, options):
    reference = get_peft_model(copy.deepcopy(model), LoraConfig(**options))
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return reference.eval()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_peft_loads_what_is_saved_here(jit, tmp_path, options):
    model, x = Net(), torch.randn(5, 10)
    compiled = jit(model, **options).eval()
    save_peft(tx.handle(compiled), tmp_path / "new" / "folder")
    reference = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "new" / "folder")
    torch.testing.assert_close(reference(x), compiled(x), atol=1e-6, rtol=1e-6)
    assert not torch.allclose(model(x), compiled(x), atol=1e-3)
    names = {file.name for file in (tmp_path / "new" / "folder").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("safe", [True, False])
def test_what_peft_saved_loads_here(tmp_path, options, safe):
    model, x = Net(), torch.randn(5, 10)
    reference = trained_by_peft(model, options)
    reference.save_pretrained(tmp_path, safe_serialization=safe)
    compiled = loaded(model, tmp_path).eval()
    torch.testing.assert_close(compiled(x), reference(x), atol=1e-6, rtol=1e-6)
    assert not torch.allclose(model(x), compiled(x), atol=1e-3)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_keys_values_and_shapes_are_those_that_peft_writes(jit, tmp_path, options):
    reference = trained_by_peft(Net(), options)
    reference.save_pretrained(tmp_path / "theirs")
    save_peft(tx.handle(loaded(Net(), tmp_path / "theirs")), tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_bfloat16(tmp_path):
    model, x = Net().bfloat16(), torch.randn(5, 10).bfloat16()
    reference = get_peft_model(
        copy.deepcopy(model), LoraConfig(target_modules="all-linear"), autocast_adapter_dtype=False
    )
    for name, parameter in reference.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    reference.save_pretrained(tmp_path)
    compiled = loaded(model, tmp_path)
    found = dict(compiled.named_parameters())["first.lora_B.default.weight"]
    assert found.dtype == torch.float32
    # PEFT rounds the product of A and B to bfloat16.
    torch.testing.assert_close(compiled(x), reference(x), atol=3e-2, rtol=3e-2)
    save_peft(tx.handle(compiled), tmp_path / "ours")
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours")
    torch.testing.assert_close(again(x), compiled(x), atol=0, rtol=0)


def test_tied_layers(jit, tmp_path):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.twin = nn.Linear(12, 12)
            self.twin.weight = self.middle.weight

        def forward(self, x):
            return self.twin(super().forward(x).repeat(1, 2)[:, :12])

    model, x = Tied(), torch.randn(5, 10)
    compiled = jit(model).eval()
    save_peft(tx.handle(compiled), tmp_path)
    reference = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    torch.testing.assert_close(reference(x), compiled(x), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(loaded(model, tmp_path).eval()(x), compiled(x), atol=0, rtol=0)
    change(tmp_path, lambda state: state["base_model.model.twin.lora_A.weight"].add_(1))
    with pytest.raises(tx.errors.CheckpointError, match=r"different tensors for '.*middle.lora_A.weight' and '.*twin"):
        loaded(model, tmp_path)


def change(folder, edit):
    state = load_file(folder / "adapter_model.safetensors")
    edit(state)
    save_file(state, folder / "adapter_model.safetensors")


def change_config(**values):
    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def truncate(name):
    def edit(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:-20])

    return edit


A = "base_model.model.first.lora_A.weight"
BAD = {
    "shape": (
        lambda f: change(f, lambda s: s.update({A: torch.zeros(7, 10)})),
        r"shape \(7, 10\) instead of \(8, 10\)",
    ),
    "integers": (
        lambda f: change(f, lambda s: s.update({A: torch.zeros(8, 10, dtype=torch.int8)})),
        "is torch.int8",
    ),
    "missing": (lambda f: change(f, lambda s: s.pop(A)), rf"lacks '{A}'"),
    "unexpected": (
        lambda f: change(f, lambda s: s.update(other=torch.zeros(1))),
        "has 'other', which the model does not",
    ),
    "truncated": (truncate("adapter_model.safetensors"), "adapter_model.safetensors cannot be read"),
    "absent": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors cannot be read",
    ),
    "scaling": (change_config(lora_alpha=3), r"scales 'first' by 0.375, but the model scales by 1\."),
    "field": (
        change_config(trainable_token_indices=[1], lora_bias=True),
        "asks for lora_bias=True, trainable_token",
    ),
    "other kind": (change_config(peft_type="IA3"), "the type 'IA3' and not 'LORA'"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
    "config": (truncate("adapter_config.json"), "adapter_config.json cannot be read as JSON"),
}


@pytest.mark.parametrize(("edit", "problem"), BAD.values(), ids=BAD)
def test_bad_files_change_nothing(jit, tmp_path, edit, problem):
    compiled = jit(Net())
    save_peft(tx.handle(jit(Net())), tmp_path)
    edit(tmp_path)
    before = {name: p.detach().clone() for name, p in compiled.named_parameters()}
    with pytest.raises(tx.errors.CheckpointError, match=problem):
        load_peft(tx.handle(compiled), tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in compiled.named_parameters())


def test_a_pickle_that_runs_code_is_refused(jit, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (print, ("ran",))

    save_peft(tx.handle(jit(Net())), tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({A: Bomb()}, tmp_path / "adapter_model.bin")
    with pytest.raises(tx.errors.CheckpointError, match=r"adapter_model.bin is damaged or holds more than tensors"):
        load_peft(tx.handle(jit(Net())), tmp_path)


def test_patterns_keep_their_order(jit, tmp_path):
    patterns = {"middle": 3, "first|middle": 2}
    save_peft(tx.handle(jit(Net(), rank_pattern=patterns)), tmp_path)
    assert list(peft_options(tmp_path)["rank_pattern"].items()) == list(patterns.items())


def test_what_peft_cannot_have_is_not_saved(jit, tmp_path):
    with pytest.raises(tx.errors.CheckpointError, match="only on layers inside a model"):
        save_peft(tx.handle(jit(nn.Linear(8, 8))), tmp_path)
    with pytest.raises(tx.errors.PipelineError, match=r"no adapter 'defualt'"):
        save_peft(tx.handle(jit(Net())), tmp_path, "defualt")
    assert not list(tmp_path.iterdir())
