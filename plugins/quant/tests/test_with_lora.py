"""quant and lora against PEFT on bitsandbytes' 4-bit layers, or on the dequantized model for int8."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import thunder_xform as tx

pytest.importorskip("thunder_xform_lora", reason="needs the plugin lora")

NAMES = ("up", "down")
LORA = {"r": 4, "lora_alpha": 12, "target_modules": ["up", "down"]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 64)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)
        self.lm_head = nn.Linear(64, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.lm_head(x + self.down(torch.nn.functional.silu(self.up(self.norm(x)))))


def int8(weight):
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step).round() * step


@pytest.fixture
def on_peft(in_four_bits):
    """PEFT's model over the quantized base, and its adapters by the compiled model's names."""

    def make(model, scheme, double_quant, **options):
        if scheme == "int8":
            base = copy.deepcopy(model)
            with torch.no_grad():
                for name in NAMES:
                    base.get_submodule(name).weight.copy_(int8(base.get_submodule(name).weight))
        else:
            base = in_four_bits(model, scheme, double_quant, NAMES)
        peft = get_peft_model(base, LoraConfig(**LORA, **options))
        found = {n.removeprefix("base_model.model."): p for n, p in peft.named_parameters() if "lora_" in n}
        with torch.no_grad():
            for name, parameter in found.items():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        return peft, found

    return make


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(
    ("request_", "scheme", "double_quant", "dora"),
    [
        (("lora", "quant"), "nf4", True, False),
        (("quant", "lora"), "nf4", False, True),
        (("quant", "lora"), "fp4", True, True),
        (("lora", "quant"), "int8", None, False),
        (("lora", "quant"), "int8", None, True),
    ],
)
def test_twenty_steps_of_adamw_equal_peft(jit, on_peft, request_, scheme, double_quant, dora):
    model = Net()
    peft, theirs = on_peft(model, scheme, double_quant, use_dora=dora)
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compiled = jit(
        model, *request_, lora={**LORA, "use_dora": dora}, quant={"scheme": scheme, "double_quant": double_quant}
    )
    handle = tx.handle(compiled)
    for name in theirs:
        if "magnitude" in name:  # At first, the lengths of the rows as they are dequantized.
            torch.testing.assert_close(handle.parameters[name], theirs[name], atol=1e-6, rtol=1e-6)
    assert handle.pipeline == ("quant", "lora")
    handle.load_state_dict({name: p.detach().clone() for name, p in theirs.items()}, kind="adapter")
    ours = {name: p for name, p in handle.parameters.items() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    packed = {n: p.clone() for n, p in handle.parameters.items() if not p.requires_grad}
    assert sum(not p.is_floating_point() for p in packed.values()) == (4 if double_quant else 2)

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (compiled, peft)]
    first = last = 0.0
    tokens = torch.randint(0, 11, (4, 9))
    for step in range(20):
        losses = [loss_of(m, tokens) for m in (compiled, peft)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, atol=1e-6, rtol=1e-6, msg=f"loss of step {step}")
        if step == 0:
            torch.testing.assert_close(compiled(tokens), peft(tokens), atol=1e-6, rtol=1e-6)
            for name, parameter in theirs.items():
                torch.testing.assert_close(ours[name].grad, parameter.grad, atol=1e-6, rtol=1e-6)
            first = losses[0].item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        last = losses[0].item()
    assert last < first
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, atol=1e-6, rtol=1e-5, msg=lambda t, n=name: f"{n}: {t}")
    for name, tensor in packed.items():
        assert torch.equal(handle.parameters[name], tensor), f"{name} changed"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, untouched[name]), f"{name} of the user's module changed"

    # Merging happens on the way out, into the dequantized weights: no second rounding to 4 bits.
    plain = Net()
    plain.load_state_dict(handle.state_dict())
    torch.testing.assert_close(plain(tokens), peft(tokens), atol=1e-5, rtol=5e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_autocast(jit, on_peft, dora):
    model, tokens = Net(), torch.randint(0, 11, (4, 9))
    peft, theirs = on_peft(model, "nf4", True, use_dora=dora)
    quant = {"scheme": "nf4", "double_quant": True}
    compiled = jit(model, "quant", "lora", lora={**LORA, "use_dora": dora}, quant=quant)
    handle = tx.handle(compiled)
    handle.load_state_dict({name: p.detach().clone() for name, p in theirs.items()}, kind="adapter")
    with torch.autocast("cpu", torch.bfloat16):
        outputs = compiled(tokens), peft(tokens)
    assert "quant_linear" in str(thunder.last_traces(compiled)[-1]), "the layers multiply packed weights"
    torch.testing.assert_close(*outputs, atol=2e-2, rtol=2e-2)
    for out in outputs:
        out.float().sin().mean().backward()
    for name, parameter in theirs.items():
        atol = 2e-2 * parameter.grad.abs().max().item()
        torch.testing.assert_close(handle.parameters[name].grad, parameter.grad, atol=atol, rtol=0)


def test_dora_with_dropout_reads_the_dequantized_weight(jit):
    """A probability that drops nothing takes the path with a product of its own to the same values."""
    options = {**LORA, "use_dora": True, "lora_dropout": 1e-12, "init_lora_weights": False}
    compiled, tokens = jit(Net(), "quant", "lora", lora=options, quant={"scheme": "int8"}), torch.randint(0, 11, (2, 5))
    with torch.no_grad():
        tx.handle(compiled).parameters["up.lora_magnitude_vector.default.weight"].mul_(1.5)
    torch.testing.assert_close(compiled(tokens), compiled.eval()(tokens), atol=1e-5, rtol=1e-5)
    plain = Net()
    plain.load_state_dict(tx.handle(compiled).state_dict())
    torch.testing.assert_close(plain(tokens), compiled(tokens), atol=1e-5, rtol=1e-5)


def test_a_plain_state_replaces_base_and_adapters(jit):
    compiled = jit(Net(), "quant", "lora", lora=LORA, quant={"scheme": "int8"})
    handle = tx.handle(compiled)
    with torch.no_grad():
        handle.parameters["up.lora_B.default.weight"].normal_()
    other, tokens = Net(), torch.randint(0, 11, (2, 5))
    handle.load_state_dict(other.state_dict())
    with torch.no_grad():
        for name in NAMES:
            other.get_submodule(name).weight.copy_(int8(other.get_submodule(name).weight))
    torch.testing.assert_close(compiled(tokens), other(tokens), atol=1e-6, rtol=1e-5)


def test_dropout_is_on_in_training_only(jit):
    compiled = jit(Net(), "quant", "lora", lora={**LORA, "lora_dropout": 0.5}, quant={"scheme": "int8"})
    with torch.no_grad():
        for name, parameter in tx.handle(compiled).parameters.items():
            if "lora_B" in name:
                parameter.normal_()
    tokens = torch.randint(0, 11, (2, 5))
    assert not torch.equal(compiled(tokens), compiled(tokens))
    compiled.eval()
    assert torch.equal(compiled(tokens), compiled(tokens))
