"""U15 for adapters: full state merges, adapter state resumes exactly, bad states change nothing."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import thunder_xform as tx

OPTIONS = {"r": 2, "lora_alpha": 3}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.twin = nn.Linear(6, 6)
        self.twin.weight = self.tied.weight
        self.scale = nn.Parameter(torch.rand(6))
        self.register_buffer("shift", torch.rand(6))
        self.register_buffer("scratch", torch.rand(6), persistent=False)

    def forward(self, x):
        return self.twin(torch.tanh(self.tied(self.first(x) * self.scale + self.shift + self.scratch)))


def fresh(jit, **options):
    model = Net()
    return model, jit(model, **{**OPTIONS, **options})


def values(compiled):
    """Copies of everything that the compiled model holds."""
    return {n: t.detach().clone() for n, t in [*compiled.named_parameters(), *compiled.named_buffers()]}


def test_full_state_is_that_of_a_plain_model_with_the_same_outputs(jit):
    model, compiled = fresh(jit)
    state = tx.handle(compiled).state_dict()
    assert list(state) == list(model.state_dict())
    plain = copy.deepcopy(model)
    plain.load_state_dict(state, strict=True)
    x = torch.randn(5, 4)
    torch.testing.assert_close(plain(x), compiled(x), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(model(x), compiled(x), atol=1e-3)
    assert torch.equal(state["tied.weight"], state["twin.weight"])


def test_full_state_equals_what_peft_merges(jit, peft_of):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2, bias=False))
    compiled = jit(model, **OPTIONS)
    merged = peft_of(model, compiled, **OPTIONS, target_modules="all-linear").merge_and_unload().state_dict()
    torch.testing.assert_close(tx.handle(compiled).state_dict(), dict(merged), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_state_keeps_the_dtype_and_rounds_once(jit, dtype):
    model = nn.Linear(32, 16).to(dtype)
    compiled = jit(model, r=4, lora_alpha=4)
    p = dict(compiled.named_parameters())
    exact = model.weight.double() + p["lora_B.default.weight"].double() @ p["lora_A.default.weight"].double()
    weight = tx.handle(compiled).state_dict()["weight"]
    assert weight.dtype == dtype
    # Half a unit in the last place of each element, and as much again for the float32 product.
    assert ((weight.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-6).all()


def test_loading_a_full_state_makes_it_the_plain_model(jit):
    other = Net()
    model, compiled = fresh(jit)
    tx.handle(compiled).load_state_dict(other.state_dict())
    x = torch.randn(5, 4)
    with torch.no_grad():
        other.scratch.copy_(model.scratch)
    torch.testing.assert_close(compiled(x), other(x), atol=1e-6, rtol=1e-5)
    found = tx.handle(compiled).state_dict()
    torch.testing.assert_close(found, dict(other.state_dict()), atol=0, rtol=0)
    # The adapters can still learn: A keeps its values.
    compiled(x).sin().sum().backward()
    gradients = {n: p.grad for n, p in compiled.named_parameters() if "lora_B" in n}
    assert all(g is not None and g.abs().max() > 0 for g in gradients.values())


def test_full_state_round_trip_keeps_the_function(jit):
    _, compiled = fresh(jit)
    x = torch.randn(5, 4)
    before = compiled(x)
    handle = tx.handle(compiled)
    handle.load_state_dict(handle.state_dict())
    torch.testing.assert_close(compiled(x), before, atol=1e-6, rtol=1e-5)


def test_adapter_state_resumes_exactly(jit):
    model, compiled = fresh(jit)
    state = tx.handle(compiled).state_dict(kind="adapter")
    assert list(state) == [
        "first.lora_A.default.weight",
        "first.lora_B.default.weight",
        "tied.lora_A.default.weight",
        "tied.lora_B.default.weight",
    ]
    again = thunder.jit(model, transforms=tx.registry.resolve(["lora"], options={"lora": OPTIONS}))
    tx.handle(again).load_state_dict(state, kind="adapter")
    x = torch.randn(5, 4)
    torch.testing.assert_close(again(x), compiled(x), atol=0, rtol=0)


def test_sharded_state_is_everything_that_is_stored(jit):
    model, compiled = fresh(jit)
    state = tx.handle(compiled).state_dict(kind="sharded")
    assert set(state) == {n for n, _ in compiled.named_parameters()} | {"shift"}
    assert state["first.weight"].data_ptr() == model.first.weight.data_ptr()
    _, other = fresh(jit)
    tx.handle(other).load_state_dict(state, kind="sharded")
    assert all(torch.equal(values(other)[name], value) for name, value in state.items())


def test_no_full_state_where_an_adapter_breaks_a_tie(jit):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens):
            return self.head(self.tokens(tokens))

    handle = tx.handle(jit(Tied(), r=2))
    with pytest.raises(tx.errors.CheckpointError, match=r"'head' no longer has .* shares with 'tokens'"):
        handle.state_dict()
    assert list(handle.state_dict("adapter")) == ["head.lora_A.default.weight", "head.lora_B.default.weight"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s: s.pop("first.lora_B.default.weight"), "lacks 'first.lora_B.default.weight'"),
        (lambda s: s.update({"first.lora_C": torch.zeros(1)}), "unexpected 'first.lora_C'"),
        (
            lambda s: s.update({"tied.lora_A.default.weight": torch.zeros(3, 6)}),
            r"shape \(3, 6\) instead of \(2, 6\)",
        ),
        (
            lambda s: s.update({"tied.lora_A.default.weight": torch.zeros(2, 6, dtype=torch.int8)}),
            "is torch.int8",
        ),
        (lambda s: s.update({"tied.lora_A.default.weight": torch.empty(2, 6, device="meta")}), "no data"),
        (lambda s: s.update({"tied.lora_A.default.weight": [[0.0]]}), "is of type list and no tensor"),
    ],
)
def test_a_bad_adapter_state_changes_nothing(jit, change, problem):
    _, compiled = fresh(jit)
    handle = tx.handle(compiled)
    before = values(compiled)
    state = {name: torch.ones_like(tensor) for name, tensor in handle.state_dict("adapter").items()}
    change(state)
    with pytest.raises(tx.errors.CheckpointError, match=problem):
        handle.load_state_dict(state, kind="adapter")
    assert all(torch.equal(value, before[name]) for name, value in values(compiled).items())


def test_adapter_file_in_a_fresh_model(jit, tmp_path):
    model, compiled = fresh(jit)
    path = tmp_path / "adapter.safetensors"
    tx.checkpoint.save_adapter(tx.handle(compiled), path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    request = tx.checkpoint.adapter_request(path)
    assert request[0][1]["lora_alpha"] == 3
    again = thunder.jit(model, transforms=tx.registry.resolve(request))
    tx.checkpoint.load_adapter(tx.handle(again), path)
    x = torch.randn(5, 4)
    torch.testing.assert_close(again(x), compiled(x), atol=0, rtol=0)


def test_bad_adapter_files_change_nothing(jit, tmp_path):
    _, compiled = fresh(jit)
    handle, before = tx.handle(compiled), values(compiled)
    good = tmp_path / "good.safetensors"
    _, other = fresh(jit)
    tx.checkpoint.save_adapter(tx.handle(other), good)
    bad = {name: tmp_path / name for name in ("absent", "truncated", "foreign", "garbage")}
    bad["truncated"].write_bytes(good.read_bytes()[:-10])
    bad["garbage"].write_bytes(b"\x00garbage")
    save_file(load_file(good), bad["foreign"])
    for name, problem in [
        ("absent", "cannot be read as a safetensors file"),
        ("truncated", "cannot be read as a safetensors file"),
        ("garbage", "cannot be read as a safetensors file"),
        ("foreign", "not one of the format"),
    ]:
        with pytest.raises(tx.errors.CheckpointError, match=problem):
            tx.checkpoint.load_adapter(handle, bad[name])
    _, wider = fresh(jit, lora_alpha=16)
    with pytest.raises(tx.errors.CheckpointError, match=r"lora_alpha=3\.0.* but the model has .*lora_alpha=16\.0"):
        tx.checkpoint.load_adapter(tx.handle(wider), good)
    assert all(torch.equal(value, before[name]) for name, value in values(compiled).items())
    tx.checkpoint.load_adapter(handle, good)
    assert not torch.equal(values(compiled)["first.lora_B.default.weight"], before["first.lora_B.default.weight"])
