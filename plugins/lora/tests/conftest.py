"""Models, and the reference: PEFT on a copy of the model with the same adapters."""

from __future__ import annotations

import thunder_xform as tx  # Before Thunder.

# isort: split

import copy
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from thunder_xform.testing.fixtures import ranks

__all__ = ["ranks"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def jit() -> Callable[..., Any]:
    """``jit(model, **options)``: the model compiled with lora, its adapters set to random values."""

    def make(model: torch.nn.Module, **options: Any) -> Any:
        compiled = thunder.jit(model, transforms=tx.registry.resolve(["lora"], options={"lora": options}))
        for name, parameter in compiled.named_parameters():
            if ".lora_B." in f".{name}":
                torch.nn.init.normal_(parameter, std=0.1)
        return compiled

    return make


@pytest.fixture
def peft_of() -> Callable[..., PeftModel]:
    """``peft_of(model, compiled, **options)``: PEFT's model with the adapter values of ``compiled``."""

    def make(model: torch.nn.Module, compiled: Any, **options: Any) -> PeftModel:
        made = get_peft_model(copy.deepcopy(model), LoraConfig(**options))
        ours = {f"base_model.model.{n}": p for n, p in compiled.named_parameters() if "lora_" in n}
        theirs = {name: p for name, p in made.named_parameters() if "lora_" in name}
        assert ours.keys() == theirs.keys()
        with torch.no_grad():
            for name, parameter in theirs.items():
                assert (parameter.shape, parameter.dtype) == (ours[name].shape, ours[name].dtype)
                parameter.copy_(ours[name])
        return made

    return make
