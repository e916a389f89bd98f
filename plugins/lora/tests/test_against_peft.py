"""Outputs, gradients and training steps equal PEFT's with the same adapters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width // 2, bias=False)
        self.v_proj = nn.Linear(width, width // 2, bias=False)
        self.o_proj = nn.Linear(width // 2, width)

    def forward(self, x):
        weights = torch.softmax(self.k_proj(x) @ self.v_proj(x).transpose(-1, -2), -1)
        return self.o_proj(weights @ self.v_proj(self.q_proj(x)))


class Net(nn.Module):
    """Non-square layers with and without bias, one of them called twice; two outputs."""

    def __init__(self, width=16):
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)), x


CASES = [
    {"r": 4, "target_modules": "all-linear"},
    {"r": 2, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    {"r": 3, "lora_alpha": 1, "target_modules": r".*\.1\.(k|o)_proj"},
    {"r": 8, "target_modules": ["blocks.0.q_proj", "head"], "exclude_modules": ["head"]},
    {"r": 1, "target_modules": "all-linear", "exclude_modules": r"blocks\.0\..*"},
]


@pytest.mark.parametrize("options", CASES)
def test_twenty_steps(jit, peft_of, train_both, options):
    model = Net()
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)
    tokens = torch.randint(0, 11, (3, 5))
    assert not torch.allclose(model(tokens)[0], compiled(tokens)[0], atol=1e-2)
    before = [p.detach().clone() for p in compiled.parameters() if p.requires_grad]
    train_both(compiled, reference, tokens)
    after = [p for p in compiled.parameters() if p.requires_grad]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(after, before, strict=True)), "every adapter trained"


def test_double_precision(jit, peft_of):
    """Where rounding is out of the way, so is any difference."""
    model = Net().double()
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)
    tokens, labels = torch.randint(0, 11, (20, 4, 6)), torch.randint(0, 11, (20, 4, 6))
    losses = []
    for net in (compiled, reference):
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
        losses.append([])
        for x, y in zip(tokens, labels, strict=True):
            loss = nn.functional.cross_entropy(net(x)[0].flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], atol=1e-12, rtol=0)
    assert losses[0][-1] != pytest.approx(losses[0][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_base_has_float32_adapters(jit, peft_of, dtype):
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    options = {"r": 2, "target_modules": "all-linear"}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)  # Compares the adapters' dtypes, too.
    x = torch.randn(5, 12, dtype=dtype)
    ours, theirs = compiled(x), reference(x)
    assert ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    for name, parameter in compiled.named_parameters():
        if parameter.requires_grad:
            wanted = reference.get_parameter(f"base_model.model.{name}").grad
            # Gradients pass through half-precision activations: two roundings of the largest element.
            atol = 2 * torch.finfo(dtype).eps * wanted.abs().max().item()
            torch.testing.assert_close(parameter.grad, wanted, atol=atol, rtol=0)


class Mixed(nn.Module):
    """Every kind of layer but transformers' Conv1D: Thunder cannot compile that under autocast."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.line = nn.Conv1d(8, 8, 3, padding=1)
        self.plane = nn.Conv2d(1, 1, 3, padding="same", bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        x = self.plane(torch.tanh(self.line(self.tokens(tokens).mT))[:, None])[:, 0].mT
        return self.head(x)


@pytest.mark.parametrize("dora", [False, True])
def test_autocast(jit, peft_of, dora):
    model, tokens = Mixed(), torch.randint(0, 11, (3, 4))
    names = [name for name, _ in model.named_children()]
    options = {"r": 1, "target_modules": names, "use_dora": dora}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = compiled(tokens), reference(tokens)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
    ours.float().sin().sum().backward()
    theirs.float().sin().sum().backward()
    for name, parameter in compiled.named_parameters():
        if parameter.requires_grad:
            wanted = reference.get_parameter(f"base_model.model.{name}").grad
            assert parameter.grad.dtype == torch.float32
            # A few roundings of the largest element; eager PyTorch rounds at other places.
            atol = 8 * 2**-8 * wanted.abs().max().item()
            torch.testing.assert_close(parameter.grad, wanted, atol=atol, rtol=0)


def test_new_adapters_change_nothing_and_are_initialized_like_a_linear_layer(jit):
    import thunder

    import thunder_xform as tx

    model = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 3))
    compiled = thunder.jit(
        model, transforms=tx.registry.resolve(["lora"], options={"lora": {"r": 64, "exclude_modules": ["2"]}})
    )
    x = torch.randn(7, 64)
    torch.testing.assert_close(compiled(x), model(x), atol=0, rtol=0)
    parameters = dict(compiled.named_parameters())
    a, b = parameters["0.lora_A.default.weight"], parameters["0.lora_B.default.weight"]
    assert torch.equal(b, torch.zeros(500, 64))
    # kaiming_uniform_(a=sqrt(5)): uniform within 1 / sqrt(in_features).
    bound = 64**-0.5
    assert a.abs().max() <= bound
    assert a.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_adapters_follow_torchs_random_state(jit):
    model = nn.Linear(6, 4)
    first, second = (copy.deepcopy(dict(_seeded(jit, model, s).named_parameters())) for s in (1, 1))
    other = dict(_seeded(jit, model, 2).named_parameters())
    name = "lora_A.default.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], other[name])


def _seeded(jit, model, seed):
    torch.manual_seed(seed)
    return jit(model, r=2)
