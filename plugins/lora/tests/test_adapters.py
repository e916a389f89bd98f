"""Several adapters on one model: switch, weight, disable, merge. Each selection compiles once."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import thunder_xform as tx
from thunder_xform_lora import load_peft, peft_options, save_peft

OPTIONS = {"r": 2, "lora_alpha": 3, "target_modules": ["first", "last"]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def compile_(model, names=("a", "b", "c"), **options):
    options = {**OPTIONS, "adapters": names, **options}
    compiled = thunder.jit(model, transforms=tx.registry.resolve(["lora"], options={"lora": options}))
    for name, parameter in compiled.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return compiled, tx.handle(compiled).plugin("lora")


def peft_of(model, compiled, names=("a", "b", "c")):
    configs = {name: {**OPTIONS, **(names[name] if isinstance(names, dict) else {})} for name in names}
    (first, config), *others = configs.items()
    reference = get_peft_model(copy.deepcopy(model), LoraConfig(**config), adapter_name=first)
    for name, config in others:
        reference.add_adapter(name, LoraConfig(**config))
    values = {f"base_model.model.{n}": p for n, p in compiled.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_" in name:
                parameter.copy_(values.pop(name))
    assert not values
    return reference


def test_switching_is_like_peft_and_compiles_once_each():
    model, x = Net(), torch.randn(5, 6)
    compiled, lora = compile_(model)
    reference = peft_of(model, compiled)
    assert lora.active_adapters == {"a": 1.0}
    for _ in range(2):
        for chosen in ("a", "b", ["c"], ["a", "c"]):
            lora.set_adapter(chosen)
            reference.base_model.set_adapter(chosen)
            torch.testing.assert_close(compiled(x), reference(x), atol=1e-6, rtol=1e-6)
        lora.disable()
        torch.testing.assert_close(compiled(x), model(x), atol=0, rtol=0)
        lora.enable()
        assert lora.active_adapters == {"a": 1.0, "c": 1.0}
        torch.testing.assert_close(compiled(x), reference(x), atol=1e-6, rtol=1e-6)
    assert thunder.cache_misses(compiled) == 5
    assert "guard key of 'lora': ((False, ('a', 1.0)),) -> ((False, ('b', 1.0)),)" in tx.handle(compiled).explain()


def test_only_what_is_active_trains():
    model, x = Net(), torch.randn(5, 6)
    compiled, lora = compile_(model)
    reference = peft_of(model, compiled)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (compiled, reference)]
    for step in range(20):
        for net, choose, optimizer in zip(
            (compiled, reference), (lora.set_adapter, reference.base_model.set_adapter), optimizers, strict=True
        ):
            choose("ab"[step % 2])
            optimizer.zero_grad()
            net(x).sin().sum().backward()
            optimizer.step()
    theirs = dict(reference.named_parameters())
    for name, parameter in compiled.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(parameter, theirs[f"base_model.model.{name}"], atol=1e-6, rtol=1e-5)
    assert all(p.grad is None for name, p in compiled.named_parameters() if ".c." in name)
    assert thunder.cache_misses(compiled) == 2


def test_weights():
    model, x = Net(), torch.randn(5, 6)
    compiled, lora = compile_(model)
    lora.set_adapter({"a": 0.25, "b": -2})
    p = dict(compiled.named_parameters())
    for layer in ("first", "last"):
        change = sum(
            w * p[f"{layer}.lora_B.{n}.weight"] @ p[f"{layer}.lora_A.{n}.weight"] for n, w in (("a", 0.25), ("b", -2))
        )
        p[layer] = model.get_submodule(layer).weight + 1.5 * change
    hidden = torch.tanh(nn.functional.linear(x, p["first"], model.first.bias))
    expected = nn.functional.linear(hidden, p["last"], model.last.bias)
    torch.testing.assert_close(compiled(x), expected, atol=1e-5, rtol=1e-5)
    # The plain model that computes the same has the active adapters, with their weights.
    plain = Net()
    plain.load_state_dict(tx.handle(compiled).state_dict())
    torch.testing.assert_close(plain(x), expected, atol=1e-5, rtol=1e-5)
    lora.disable()
    torch.testing.assert_close(tx.handle(compiled).state_dict(), dict(model.state_dict()), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ("d", "no adapter 'd'.*It has 'a', 'b', 'c'"),
        (["a", "d"], "no adapter 'd'"),
        ([], "No adapter is named"),
        ({"a": float("nan")}, "The weight of the adapter 'a' is nan"),
        ({"a": "1"}, "The weight of the adapter 'a' is '1'"),
    ],
)
def test_bad_choices_change_nothing(choice, problem):
    _, lora = compile_(Net())
    lora.set_adapter({"b": 2})
    with pytest.raises(tx.errors.PipelineError, match=problem):
        lora.set_adapter(choice)
    assert lora.active_adapters == {"b": 2.0}


@pytest.mark.parametrize("names", [(), ("a", "a"), ("a.b",), ("",)])
def test_bad_names(names):
    with pytest.raises(tx.errors.OptionError, match="`adapters`"):
        compile_(Net(), names)


def test_one_adapter_at_a_time_where_modules_train_whole():
    model, x = Net(), torch.randn(5, 6)
    compiled, lora = compile_(model, ("a", "b"), target_modules=["first"], modules_to_save=["last"])
    with torch.no_grad():
        dict(compiled.named_parameters())["last.modules_to_save.b.bias"].add_(1)
    lora.set_adapter("b")
    with_b = compiled(x)
    lora.disable()
    torch.testing.assert_close(compiled(x), model(x), atol=0, rtol=0)
    lora.set_adapter("a")
    assert not torch.allclose(compiled(x), with_b, atol=0.1)
    with pytest.raises(tx.errors.PipelineError, match=r"Only one adapter .* under .*modules_to_save=\('last',\)"):
        lora.set_adapter(["a", "b"])


def test_merge_and_unmerge_are_like_pefts():
    model, x = Net(), torch.randn(5, 6)
    plain = copy.deepcopy(model.state_dict())
    compiled, lora = compile_(model)
    reference = peft_of(model, compiled)
    lora.set_adapter(["a", "b"])
    reference.base_model.set_adapter(["a", "b"])
    separate = compiled(x)
    lora.merge()
    reference.merge_adapter()
    torch.testing.assert_close(compiled(x), reference(x), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(compiled(x), separate, atol=1e-5, rtol=1e-5)
    assert "linear" in str(thunder.last_traces(compiled)[0])
    assert "lora_A" not in str(thunder.last_traces(compiled)[-1])
    merged = dict(compiled.named_parameters())["first.weight"]
    torch.testing.assert_close(merged, reference.base_model.model.first.base_layer.weight, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(tx.handle(compiled).state_dict()["first.weight"], merged, atol=0, rtol=0)
    torch.testing.assert_close(model.state_dict(), plain, atol=0, rtol=0)
    for refused in (lambda: lora.set_adapter("a"), lora.disable, lora.merge):
        with pytest.raises(tx.errors.PipelineError, match="merged"):
            refused()
    for kind in ("full", "adapter"):
        handle = tx.handle(compiled)
        with pytest.raises(tx.errors.CheckpointError, match=r"unmerge\(\) first"):
            handle.load_state_dict(handle.state_dict(kind), kind)
    misses = thunder.cache_misses(compiled)
    lora.unmerge()
    torch.testing.assert_close(compiled(x), separate, atol=0, rtol=0)
    assert dict(compiled.named_parameters())["first.weight"].data_ptr() == model.first.weight.data_ptr()
    assert thunder.cache_misses(compiled) == misses
    with pytest.raises(tx.errors.PipelineError, match="No adapters are merged"):
        lora.unmerge()


def test_merge_is_refused_where_weights_cannot_take_it():
    pytest.importorskip("thunder_xform_quant", reason="needs the plugin quant")
    pipeline = tx.registry.resolve("quant(scheme='int8') + lora(r=2)")
    model = thunder.jit(nn.Sequential(nn.Linear(8, 8)), transforms=pipeline)
    before, x = model(torch.ones(1, 8)), torch.ones(1, 8)
    with pytest.raises(tx.errors.PipelineError, match=r"adapter of '0' cannot be merged: 'quant' stores '0.weight' as"):
        pipeline.plugin("lora").merge()
    torch.testing.assert_close(model(x), before, atol=0, rtol=0)
    compiled, lora = compile_(Net())
    dict(compiled.named_parameters())["last.weight"].requires_grad_(True)
    with pytest.raises(tx.errors.PipelineError, match=r"'last.weight' trains"):
        lora.merge()
    lora.disable()
    with pytest.raises(tx.errors.PipelineError, match="All adapters are disabled"):
        lora.merge()


def test_an_adapter_of_several_travels_alone(tmp_path):
    model, x = Net(), torch.randn(5, 6)
    compiled, lora = compile_(model)
    lora.set_adapter("b")
    save_peft(tx.handle(compiled), tmp_path, "b")
    other, others = compile_(model, ("x", "y"))
    before = {name: p.detach().clone() for name, p in other.named_parameters()}
    load_peft(tx.handle(other), tmp_path, "y")
    others.set_adapter("y")
    torch.testing.assert_close(other(x), compiled(x), atol=0, rtol=0)
    unchanged = [name for name, p in other.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == [name for name in before if ".y." not in name]


DIFFERENT = {
    "small": {"r": 1},
    "large": {"r": 4, "lora_alpha": 8, "use_rslora": True, "rank_pattern": {"first": 3}},
    "one": {"target_modules": ["last"]},
    "dora": {"r": 3, "use_dora": True},
}


def test_each_adapter_can_have_options_of_its_own(tmp_path):
    model, x = Net(), torch.randn(5, 6)
    compiled, lora = compile_(model, DIFFERENT)
    reference = peft_of(model, compiled, DIFFERENT)
    assert lora.modules == ("first", "last")
    for chosen in ("small", "large", "one", "dora", ["small", "large", "one"]):
        lora.set_adapter(chosen)
        reference.base_model.set_adapter(chosen)
        ours, theirs = compiled(x), reference(x)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        for net, out in ((compiled, ours), (reference, theirs)):
            net.zero_grad()
            out.sin().mean().backward()
        gradients = {f"base_model.model.{n}": p.grad for n, p in compiled.named_parameters() if p.grad is not None}
        wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        torch.testing.assert_close(gradients, wanted, atol=1e-6, rtol=0)
        lora.merge()
        torch.testing.assert_close(compiled(x), ours, atol=1e-5, rtol=1e-5)
        plain = Net()
        plain.load_state_dict(tx.handle(compiled).state_dict())
        torch.testing.assert_close(plain(x), ours, atol=1e-5, rtol=1e-5)
        lora.unmerge()
    with pytest.raises(tx.errors.PipelineError, match=r"Only one adapter .* under use_dora=True"):
        lora.set_adapter(["small", "dora"])
    # Adapters that PEFT saved, each with its configuration, come together in one model; and back.
    reference.save_pretrained(tmp_path / "theirs")
    folders = {name: tmp_path / "theirs" / name for name in DIFFERENT}
    together, lora = compile_(model, {name: peft_options(folder) for name, folder in folders.items()})
    for name, folder in folders.items():
        load_peft(tx.handle(together), folder, name)
        lora.set_adapter(name)
        reference.base_model.set_adapter(name)
        torch.testing.assert_close(together(x), reference(x), atol=1e-6, rtol=0)
        save_peft(tx.handle(together), tmp_path / "ours" / name, name)
        again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours" / name)
        torch.testing.assert_close(again(x), reference(x), atol=1e-6, rtol=0)
    # A plain state takes all of them out.
    tx.handle(together).load_state_dict(model.state_dict())
    for name in DIFFERENT:
        lora.set_adapter(name)
        torch.testing.assert_close(together(x), model(x), atol=1e-5, rtol=1e-5)


def test_adapters_of_their_own_options_resume(tmp_path):
    model, x = Net(), torch.randn(5, 6)
    compiled, lora = compile_(model, DIFFERENT)
    tx.checkpoint.save_adapter(tx.handle(compiled), tmp_path / "all.safetensors")
    request = tx.checkpoint.adapter_request(tmp_path / "all.safetensors")
    again = thunder.jit(model, transforms=tx.registry.resolve(request))
    tx.checkpoint.load_adapter(tx.handle(again), tmp_path / "all.safetensors")
    for name in ("large", "dora"):
        lora.set_adapter(name)
        tx.handle(again).plugin("lora").set_adapter(name)
        torch.testing.assert_close(again(x), compiled(x), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("adapters", "problem"),
    [
        ({"a": {"r": 0}}, "of the options that `adapters` gives 'a', `r` is 0, but a rank is"),
        ({"a": {"r": 4.0}}, "gives 'a', `r` is 4.0, but a rank is a whole number"),
        ({"a": {"target_modules": 5}}, "of the options that `adapters` gives 'a', 'int' object is not iterable"),
        ({"a": {}, "b": {"bias": "some"}}, "`adapters` gives 'b', `bias` is 'some', but it is 'none' or 'all' or"),
        ({"a": {"use_dora": 1}}, "`use_dora` is 1, but it is True or False"),
        ({"a": {"rnk": 1, "use_dors": True}}, "gives 'a' the option 'rnk', which there is not"),
        ({"a": {"use_dors": True}}, "'use_dors', which there is not; did you mean 'use_dora'?"),
        ({"a": {"adapters": ["b"]}}, "'adapters', which there is not"),
        ({"a": {"init_lora_weights": "pissa"}, "b": {}}, "with init_lora_weights='pissa' there can be one only"),
        ({}, "one name is needed"),
    ],
)
def test_bad_options_of_one_adapter(adapters, problem):
    with pytest.raises(tx.errors.OptionError, match=problem):
        compile_(Net(), adapters)
