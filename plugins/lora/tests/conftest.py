"""Models, and the reference: PEFT on a copy of the model with the same adapters."""

from __future__ import annotations

import thunder_xform as tx  # Before Thunder.

# isort: split

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import thunder
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from thunder_xform.testing.fixtures import ranks
from thunder_xform_lora import load_peft, peft_options, save_peft

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
            if ".lora_B." in f".{name}" or ".lora_embedding_A." in f".{name}":
                torch.nn.init.normal_(parameter, std=0.1)
        return compiled

    return make


def file_key(name: str) -> str:
    """What PEFT calls a parameter of its model in files."""
    name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector")
    return name.replace(".modules_to_save.default", "").replace(".default", "")


@pytest.fixture
def peft_of() -> Callable[..., PeftModel]:
    """``peft_of(model, compiled, **options)``: PEFT's model with the adapter values of ``compiled``."""

    def make(model: torch.nn.Module, compiled: Any, **options: Any) -> PeftModel:
        made = get_peft_model(copy.deepcopy(model), LoraConfig(**options))
        with torch.no_grad():
            for ours, theirs in pairs(compiled, made):
                assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
                theirs.copy_(ours)
        return made

    return make


def pairs(compiled: Any, reference: PeftModel) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """All trainable parameters of the compiled model, each with PEFT's."""
    ours = {name: p for name, p in compiled.named_parameters() if p.requires_grad}
    keys = tx.handle(compiled).plugin("lora").adapter("default").file_keys
    assert set(keys.values()) == ours.keys()
    theirs = {file_key(name): p for name, p in reference.named_parameters() if p.requires_grad}
    missing = theirs.keys() ^ {f"base_model.model.{key}" for key in keys}
    assert not missing, missing
    return [(ours[name], theirs[f"base_model.model.{key}"]) for key, name in keys.items()]


def _train_both(compiled: Any, reference: PeftModel, x: torch.Tensor) -> None:
    """20 steps of AdamW: the same outputs and gradients each time, and the same parameters after the last."""
    both = pairs(compiled, reference)
    optimizers = [torch.optim.AdamW([pair[side] for pair in both], lr=3e-3) for side in (0, 1)]
    for _ in range(20):
        outputs = [torch.cat([out.flatten() for out in _tuple(net(x))]) for net in (compiled, reference)]
        # Parameters may be apart by 1e-6 meanwhile, and an output is a sum over some of them.
        torch.testing.assert_close(*outputs, atol=3e-6, rtol=0)
        for out, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            out.sin().mean().backward()
        for own, others in both:
            torch.testing.assert_close(own.grad, others.grad, atol=1e-6, rtol=0)
        for optimizer in optimizers:
            optimizer.step()
    for own, others in both:
        torch.testing.assert_close(own, others, atol=1e-6, rtol=0)


@pytest.fixture
def backward_both() -> Callable[..., torch.Tensor]:
    """``backward_both(compiled, reference, x, reduce, **tolerance)``: the same outputs to 1e-6, and the same gradients
    of ``reduce(output.sin())`` within the tolerance. Returns the compiled model's output.
    """

    def check(compiled: Any, reference: PeftModel, x: torch.Tensor, reduce: Any, **tolerance: float) -> torch.Tensor:
        ours, theirs = compiled(x), reference(x)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        reduce(ours.sin()).backward()
        reduce(theirs.sin()).backward()
        for own, others in pairs(compiled, reference):
            torch.testing.assert_close(own.grad, others.grad, **tolerance)
        return ours

    return check


def _tuple(output: Any) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


@pytest.fixture
def train_both() -> Callable[[Any, PeftModel, torch.Tensor], None]:
    """``train_both(compiled, reference, x)``: 20 steps of AdamW on each, compared."""
    return _train_both


@pytest.fixture
def assert_like_peft(jit: Callable[..., Any], peft_of: Callable[..., PeftModel], tmp_path: Path) -> Callable[..., Any]:
    """``assert_like_peft(model, x, **options)``: the same outputs and gradients in 20 steps of AdamW, and files
    that each side loads from the other; merged weights compute the same. Returns the compiled model.
    """

    def check(model: torch.nn.Module, x: torch.Tensor, **options: Any) -> Any:
        compiled = jit(model, **options)
        reference = peft_of(model, compiled, **options)
        plain = copy.deepcopy(model.state_dict())
        assert not torch.allclose(compiled(x), model(x), atol=1e-3)
        _train_both(compiled, reference, x)
        torch.testing.assert_close(model.state_dict(), plain, atol=0, rtol=0)
        save_peft(tx.handle(compiled), tmp_path / "ours")
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours")
        torch.testing.assert_close(loaded(x), compiled(x), atol=1e-6, rtol=1e-6)
        reference.save_pretrained(tmp_path / "theirs")
        pipeline = tx.registry.resolve(["lora"], options={"lora": peft_options(tmp_path / "theirs")})
        again = thunder.jit(model, transforms=pipeline)
        load_peft(tx.handle(again), tmp_path / "theirs")
        with torch.no_grad():
            torch.testing.assert_close(again(x), reference(x), atol=1e-6, rtol=1e-6)
        separate, lora = compiled(x), tx.handle(compiled).plugin("lora")
        merged = copy.deepcopy(model)
        merged.load_state_dict(tx.handle(compiled).state_dict(), strict=True)
        torch.testing.assert_close(merged(x), separate, atol=1e-5, rtol=1e-5)
        lora.merge()
        reference.merge_adapter()
        torch.testing.assert_close(compiled(x), reference(x), atol=1e-5, rtol=1e-5)
        lora.unmerge()
        torch.testing.assert_close(compiled(x), separate, atol=0, rtol=0)
        return compiled

    return check
