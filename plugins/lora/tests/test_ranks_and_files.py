"""V18, V36: adapters of any rank that PEFT has; damaged files are named, and change nothing."""

from __future__ import annotations

import copy
import json

import pytest
import thunder
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import thunder_xform as tx
from thunder_xform_lora import load_peft, peft_options, save_peft


class Net(nn.Module):
    """Layers whose smaller sides are 2, 1, 3 and 4."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(3, 6)
        self.conv = nn.Conv1d(6, 4, 1)
        self.narrow = nn.Linear(4, 2)
        self.last = nn.Linear(2, 1, bias=False)

    def forward(self, tokens):
        x = self.conv(self.words(tokens).transpose(1, 2)).transpose(1, 2)
        return self.last(torch.tanh(self.narrow(x)))


NAMES = ["words", "conv", "narrow", "last"]


@pytest.mark.parametrize(
    "options",
    [
        {"r": 8, "target_modules": NAMES},
        {"r": 8, "target_modules": ["narrow", "last"], "use_dora": True},
        {"r": 1, "rank_pattern": {"narrow": 5}, "target_modules": NAMES, "use_rslora": True},
        {"r": 8, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
    ],
)
def test_v18_a_rank_larger_than_the_layer(tmp_path, options):
    torch.manual_seed(0)
    model, tokens = Net(), torch.tensor([[0, 1, 2], [2, 0, 1]])
    reference = get_peft_model(copy.deepcopy(model), LoraConfig(**options))
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    reference.save_pretrained(tmp_path)
    pipeline = tx.registry.resolve(["lora"], options={"lora": peft_options(tmp_path)})
    compiled = thunder.jit(model, transforms=pipeline)
    load_peft(tx.handle(compiled), tmp_path)
    reference(tokens).sum().backward()
    compiled(tokens).sum().backward()
    torch.testing.assert_close(compiled(tokens), reference(tokens), atol=1e-6, rtol=1e-6)
    expected = {name.removeprefix("base_model.model."): p.grad for name, p in reference.named_parameters()}
    for name, parameter in compiled.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    handle = tx.handle(thunder.jit(Net(), transforms=tx.registry.resolve("lora(r=2)")))
    save_peft(handle, folder)
    return handle, folder


def config(change):
    def edit(folder):
        path = folder / "adapter_config.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return edit


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def truncated(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def other_tensors(change):
    def edit(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return edit


def as_bin(value):
    def edit(folder):
        (folder / "adapter_model.safetensors").unlink()
        torch.save(value, folder / "adapter_model.bin")

    return edit


A = "base_model.model.narrow.lora_A.weight"
CONFIG = "{folder}/adapter_config.json"
DAMAGED = "The file is damaged or was edited; save the adapter with PEFT once more."
WEIGHTS = "{folder}/adapter_model.safetensors"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (written("adapter_config.json", b"{"), CONFIG + " cannot be read as JSON (Expecting property name"),
        (written("adapter_config.json", b"\xff\xfe{}"), CONFIG + " cannot be read as JSON ('utf-8' codec can't"),
        (written("adapter_config.json", b"[" * 100_000), CONFIG + " cannot be read as JSON (maximum recursion depth"),
        (written("adapter_config.json", b"[]"), CONFIG + " describes an adapter of the type 'list' and not 'LORA'."),
        (config(lambda c: c.update(r="8")), CONFIG + " holds options that no adapter has: `r` is '8', but a rank"),
        (config(lambda c: c.update(target_modules=5)), CONFIG + " holds options that no adapter has: "),
        (config(lambda c: c.update(rank_pattern=[1])), CONFIG + " holds options that no adapter has: "),
        (config(lambda c: c.update(lora_alpha=float("nan"))), CONFIG + " holds options that no adapter has: "),
        (config(lambda c: c.update(init_lora_weights=[])), CONFIG + " holds options that no adapter has: "),
        (truncated, WEIGHTS + " cannot be read (Error while deserializing header"),
        (written("adapter_model.safetensors", b""), WEIGHTS + " cannot be read (Error while deserializing header"),
        (as_bin([1, 2]), "{folder}/adapter_model.bin holds something else than tensors by name. Save it with PEFT."),
        (as_bin({A: {"a": 1}}), "{folder}/adapter_model.bin holds something else than tensors by name."),
        (other_tensors(lambda t: t.update({A: torch.ones(5, 4)})), "'narrow.lora_A.default.weight' has shape (5, 4)"),
        (other_tensors(lambda t: t.update({A: torch.ones(2, 4).int()})), "is torch.int32, but the model holds"),
    ],
)
def test_v36_a_damaged_folder_of_peft_is_named(saved, tmp_path, damage, told):
    handle, folder = saved
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    before = {name: tensor.clone() for name, tensor in handle.state_dict("adapter").items()}
    with pytest.raises(tx.errors.CheckpointError) as caught:
        load_peft(handle, tmp_path)
    assert told.format(folder=tmp_path) in str(caught.value)
    if "no adapter has" in told:
        assert str(caught.value).endswith(DAMAGED)
        with pytest.raises(tx.errors.CheckpointError):
            peft_options(tmp_path)
    torch.testing.assert_close(handle.state_dict("adapter"), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"format": "thunder-xform adapter 1"}, "(KeyError: 'plugins')"),
        ({"format": "thunder-xform adapter 1", "plugins": "{"}, "(JSONDecodeError: Expecting property name"),
        ({"format": "thunder-xform adapter 1", "plugins": "[" * 100_000}, "(RecursionError: maximum recursion depth"),
        ({"format": "thunder-xform adapter 1", "plugins": "[1]"}, "(no options by plugin)"),
        ({"format": "thunder-xform adapter 1", "plugins": '{"lora": 1}'}, "(no options by plugin)"),
    ],
)
def test_v36_damaged_metadata_of_adapters_are_named(saved, tmp_path, metadata, told):
    handle, _ = saved
    path = tmp_path / "adapter.safetensors"
    save_file({name: t.contiguous() for name, t in handle.state_dict("adapter").items()}, path, metadata)
    for read in (tx.checkpoint.adapter_request, lambda path: tx.checkpoint.load_adapter(handle, path)):
        with pytest.raises(tx.errors.CheckpointError) as caught:
            read(path)
        told_of = f"The metadata of {path} do not say which plugins its adapters are of {told}"
        assert str(caught.value).startswith(told_of)
        assert str(caught.value).endswith("The file is damaged or was edited; save the adapters again.")
        assert caught.value.path == str(path)
