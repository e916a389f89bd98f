"""The bundle is data: it stands for quant and lora, with defaults that a request may change."""

from __future__ import annotations

import sys

import pytest

import thunder_xform as tx


def test_it_stands_for_quant_and_lora_in_that_order():
    plan = tx.registry.plan(["qlora"])
    assert plan.order == ("quant", "lora")
    assert "quant(double_quant=True, scheme='nf4')" in plan.text


def test_it_goes_before_shards():
    pytest.importorskip("thunder_xform_fsdp", reason="needs the plugin fsdp")
    assert tx.registry.plan(["fsdp", "qlora"]).order == ("quant", "lora", "fsdp")
    assert tx.registry.plan(["qlora", "fsdp"]).order == ("quant", "lora", "fsdp")


def test_a_request_overrides_its_defaults():
    text = tx.registry.plan(
        ["qlora"], options={"quant": {"scheme": "int8", "double_quant": None}, "lora": {"r": 2}}
    ).text
    assert "scheme='int8'" in text
    assert "double_quant=True" not in text
    assert "r=2" in text


def test_nothing_of_it_is_imported():
    tx.registry.resolve(["qlora"])
    assert "thunder_xform_qlora" not in sys.modules


def test_it_trains_adapters_on_a_4_bit_base():
    import thunder
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64))
    compiled = thunder.jit(model, transforms=tx.registry.resolve(["qlora"], options={"lora": {"r": 2}}))
    compiled(torch.randn(3, 64)).square().mean().backward()
    parameters = tx.handle(compiled).parameters
    assert {n for n, p in parameters.items() if p.dtype == torch.uint8 and "absmax" not in n} == {
        "0.weight",
        "1.weight",
    }
    assert all(("lora_" in name) == (p.grad is not None) == p.requires_grad for name, p in parameters.items())
