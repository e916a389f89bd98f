"""LoRA with DDP on two processes: U04, U05, U06 against eager PyTorch in one process."""

from __future__ import annotations

import itertools

import pytest
import thunder
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import thunder_xform as tx

pytest.importorskip("thunder_xform_ddp", reason="needs the plugin ddp")

R, ALPHA = 2, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3, bias=False)
        self.unused = nn.Linear(3, 3)

    @classmethod
    def seeded(cls):
        torch.manual_seed(7)
        return cls()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Mixed(Net):
    """Every kind of layer; the linear one's weight is one that 8 bits hold exactly."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 8, padding_idx=1)
        self.line = nn.Conv1d(8, 4, 3, padding=1)
        with torch.no_grad():
            self.first.weight.copy_(torch.randint(-127, 128, (6, 4)) / 128)
            self.first.weight[:, 0] = 127 / 128

    def forward(self, x):
        words = self.words(torch.clamp(x.abs() * 2, 0, 4).to(torch.int64))
        return super().forward(torch.tanh(self.line(words.transpose(1, 2))).mean(2))


def eager(model, state, x):
    """The model with adapters, in plain PyTorch."""

    def weight(layer):
        a, b = (state[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        return model.get_parameter(f"{layer}.weight").detach() + ALPHA / R * b @ a

    return F.linear(torch.tanh(F.linear(x, weight("first"), model.first.bias.detach())), weight("last"))


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(steps, 2, 5, 4, generator=generator), torch.randn(steps, 2, 5, 3, generator=generator)


def make(names, options=None, kind=Net):
    model = kind.seeded()
    torch.manual_seed(100 + dist.get_rank())  # Every rank would initialize other adapters.
    options = {"lora": {"r": R, "lora_alpha": ALPHA}, **(options or {})}
    return model, thunder.jit(model, transforms=tx.registry.resolve(names, options=options))


def adapters(compiled):
    return {name: p.detach().clone() for name, p in compiled.named_parameters() if "lora_" in name}


def train(names, steps, release):
    """Adapters before and after, last gradients, losses, and whether the user's module kept its values."""
    model, compiled = make(names, {"ddp": {"release_originals": release}})
    base = {name: p.detach().clone() for name, p in Net.seeded().named_parameters()}
    before = adapters(compiled)
    optimizer = torch.optim.AdamW([p for p in compiled.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for x, y in zip(*batches(steps), strict=True):
        optimizer.zero_grad()
        loss = F.mse_loss(compiled(x[dist.get_rank()]), y[dist.get_rank()])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    untouched = release or all(torch.equal(p, base[name]) for name, p in model.named_parameters())
    return before, adapters(compiled), gradients, losses, untouched


def reference(before, steps):
    model = Net.seeded()
    state = {name: value.clone().requires_grad_() for name, value in before.items()}
    optimizer = torch.optim.AdamW(state.values(), lr=1e-2)
    losses = []
    for x, y in zip(*batches(steps), strict=True):
        optimizer.zero_grad()
        per_rank = [F.mse_loss(eager(model, state, x[rank]), y[rank]) for rank in range(2)]
        torch.stack(per_rank).mean().backward()
        optimizer.step()
        losses.append([loss.item() for loss in per_rank])
    return {name: p.detach() for name, p in state.items()}, {n: p.grad for n, p in state.items()}, losses


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("names", list(itertools.permutations(["ddp", "lora"])), ids="+".join)
def test_u04_u05_u06_one_set_of_adapters_trains_in_any_order_of_the_request(ranks, names, release):
    results = ranks.run(train, list(names), 20, release)
    before = results[0][0]
    assert torch.count_nonzero(before["first.lora_A.default.weight"])
    state, gradients, losses = reference(before, 20)
    for rank, (start, end, found, own_losses, untouched) in enumerate(results):
        assert untouched
        torch.testing.assert_close(start, before, atol=0, rtol=0)
        torch.testing.assert_close(end, state, atol=1e-6, rtol=1e-5)
        used = {name: g for name, g in gradients.items() if g is not None}
        torch.testing.assert_close({n: found[n] for n in used}, used, atol=1e-6, rtol=1e-5)
        assert all(not found[name].any() for name in found.keys() - used.keys())
        torch.testing.assert_close(own_losses, [pair[rank] for pair in losses], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=0, rtol=0)


def effect(names):
    """Output with adapters set by hand, and what eager PyTorch makes of them."""
    model, compiled = make(names)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in compiled.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    x = torch.randn(5, 4)
    return compiled(x).detach(), eager(model, adapters(compiled), x), model(x).detach()


@pytest.mark.parametrize("names", list(itertools.permutations(["ddp", "lora"])), ids="+".join)
def test_u04_adapters_take_effect(ranks, names):
    for found, expected, base in ranks.run(effect, list(names)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(found, base, atol=0.1)


def no_sync(names):
    """Gradients of three microbatches, two of them without synchronization; adapters are set by hand."""
    _, compiled = make(names)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in compiled.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    xs, ys = batches(3)
    rank = dist.get_rank()
    for step in range(3):
        context = compiled.no_sync() if step < 2 else torch.enable_grad()
        with context:
            F.mse_loss(compiled(xs[step, rank]), ys[step, rank]).backward()
    found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    return adapters(compiled), found


def test_u02_u05_no_sync(ranks):
    results = ranks.run(no_sync, ["lora", "ddp"])
    model = Net.seeded()
    state = {name: value.requires_grad_() for name, value in results[0][0].items()}
    xs, ys = batches(3)
    for x, y in zip(xs, ys, strict=True):
        torch.stack([F.mse_loss(eager(model, state, x[r]), y[r]) for r in range(2)]).mean().backward()
    expected = {name: p.grad for name, p in state.items() if p.grad is not None}
    # Adapters of norm one give gradients of up to 20: float32 rounds them at 1e-6, elements near zero among them too.
    for _, found in results:
        torch.testing.assert_close({n: found[n] for n in expected}, expected, atol=1e-5, rtol=1e-5)


def refused(names):
    """A pattern that fails on one rank is an error on both; a state that fits on one is loaded on none."""
    rank = dist.get_rank()
    errors = []
    try:
        make(names, {"lora": {"r": R, "lora_alpha": ALPHA + rank}})
    except tx.errors.XformError as error:
        errors.append(type(error).__name__)
    _, compiled = make(names)
    handle = tx.handle(compiled)
    state = {name: torch.ones_like(t) for name, t in handle.state_dict("adapter").items()}
    before = adapters(compiled)
    if rank == 1:
        state.popitem()
    try:
        handle.load_state_dict(state, "adapter")
    except tx.errors.XformError as error:
        errors.append(type(error).__name__)
    return errors, all(torch.equal(p, before[name]) for name, p in adapters(compiled).items())


def test_ranks_refuse_together(ranks):
    assert ranks.run(refused, ["lora", "ddp"]) == [
        (["ParallelError", "ParallelError"], True),
        (["ParallelError", "CheckpointError"], True),
    ]


def saved(names, path):
    """One file, whatever the rank; both load it."""
    _, compiled = make(names)
    handle = tx.handle(compiled)
    state = adapters(compiled)
    tx.checkpoint.save_adapter(handle, path)
    dist.barrier()
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.zero_()
    tx.checkpoint.load_adapter(handle, path)
    return all(torch.equal(p, state[name]) for name, p in adapters(compiled).items())


def test_adapter_file(ranks, tmp_path):
    assert ranks.run(saved, ["lora", "ddp"], tmp_path / "adapter.safetensors") == [True, True]
    assert [file.name for file in tmp_path.iterdir()] == ["adapter.safetensors"]


def to_peft_and_back(names, folder, kind, targets):
    """An adapter saved from two ranks, by rank 0, with the gradients that it takes; then read into other adapters."""
    from thunder_xform_lora import load_peft, peft_options, save_peft

    lora = {"r": R, "lora_alpha": ALPHA, "bias": "lora_only", "modules_to_save": ["last"], "use_dora": True}
    others = {"quant": {"scheme": "int8", "target_modules": ["first"]}} if "quant" in names else {}
    model, compiled = make(names, {"lora": {**lora, "target_modules": targets}, **others}, kind)
    handle = tx.handle(compiled)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW([p for p in compiled.parameters() if p.requires_grad], lr=1e-1)
    for _ in range(3):
        optimizer.zero_grad()
        compiled(x).sin().sum().backward()
        optimizer.step()
    save_peft(handle, folder)
    dist.barrier()
    _, again = make(names, {"lora": peft_options(folder), **others}, kind)
    load_peft(tx.handle(again), folder)
    # What cannot be read on one rank is an error on both, and changes nothing.
    state = tx.handle(again).state_dict("adapter")
    missing = folder if dist.get_rank() == 0 else f"{folder}-missing"
    try:
        load_peft(tx.handle(again), missing)
        error = "none"
    except tx.errors.XformError as caught:
        error = type(caught).__name__
    unchanged = all(torch.equal(t, state[n]) for n, t in tx.handle(again).state_dict("adapter").items())
    return compiled(x).detach(), again(x).detach(), model(x).detach(), error, unchanged


@pytest.mark.parametrize(
    ("names", "kind", "targets"),
    [
        (["lora", "ddp"], Net, "all-linear"),
        (["lora", "fsdp"], Net, "all-linear"),
        (["quant", "lora", "fsdp"], Mixed, ["words", "line", "first"]),
    ],
    ids=["ddp", "fsdp", "quant and every kind of layer"],
)
def test_peft_files_of_a_distributed_model(ranks, tmp_path, names, kind, targets):
    from peft import PeftModel

    for name in names:
        pytest.importorskip(f"thunder_xform_{name}", reason=f"needs the plugin {name}")
    results = ranks.run(to_peft_and_back, names, str(tmp_path), kind, targets)
    reference = PeftModel.from_pretrained(kind.seeded(), str(tmp_path))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    for rank, (out, again, base, error, unchanged) in enumerate(results):
        torch.testing.assert_close(out, reference(x), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(again, out, atol=1e-6, rtol=1e-6)
        assert not torch.allclose(out, base, atol=0.1)
        assert error == ("ParallelError" if rank == 0 else "CheckpointError")
        assert unchanged
