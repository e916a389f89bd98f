"""The compiled model, and bitsandbytes' own layers as its reference."""

from __future__ import annotations

import thunder_xform as tx  # Before Thunder.

# isort: split

import copy
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch

from thunder_xform.testing.fixtures import ranks

__all__ = ["ranks"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def jit() -> Callable[..., Any]:
    """``jit(model, names, **options)``: the model compiled with plugins by name, options of each by name."""

    def make(model: torch.nn.Module, *names: str, **options: dict[str, Any]) -> Any:
        return thunder.jit(model, transforms=tx.registry.resolve(list(names), options=options))

    return make


@pytest.fixture
def in_four_bits() -> Callable[..., torch.nn.Module]:
    """``in_four_bits(model, quant_type, double_quant, names)``: a copy with ``bitsandbytes.nn.Linear4bit`` layers."""
    import bitsandbytes

    def make(
        model: torch.nn.Module, quant_type: str, double_quant: bool, names: tuple[str, ...], **options: Any
    ) -> torch.nn.Module:
        model = copy.deepcopy(model)
        for name in names:
            layer = model.get_submodule(name)
            packed = bitsandbytes.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                layer.bias is not None,
                compress_statistics=double_quant,
                quant_type=quant_type,
                **options,
            )
            packed.load_state_dict(layer.state_dict())
            path, _, leaf = name.rpartition(".")
            # bitsandbytes quantizes on the way to a device.
            setattr(model.get_submodule(path), leaf, packed.to(layer.weight.device))
        model.is_loaded_in_4bit = True
        return model

    return make
