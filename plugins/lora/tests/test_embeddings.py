"""Embeddings: outputs, gradients, training steps, files and merged weights equal PEFT's."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

import thunder_xform as tx
from thunder_xform_lora import load_peft, peft_options, save_peft


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8, padding_idx=3)
        self.positions = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(torch.tanh(x))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.head.weight = self.tokens.weight


NAMES = ["tokens", "positions"]


def batch():
    tokens = torch.randint(0, 11, (4, 5))
    tokens[:, 2] = 3  # The padding.
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": [*NAMES, "head"], "r": 3, "lora_alpha": 5, "rank_pattern": {"positions": 2}},
        # Dropout is on, and does nothing: PEFT has none on embeddings.
        {"target_modules": NAMES, "r": 2, "use_dora": True, "lora_dropout": 0.5},
    ],
    ids=["plain", "dora"],
)
def test_like_peft(assert_like_peft, options):
    model, tokens = Net(), batch()
    compiled = assert_like_peft(model, tokens, **options)
    # The padding's column of A never moved.
    a = dict(compiled.named_parameters())["tokens.lora_embedding_A.default"]
    assert a.grad is not None
    assert torch.equal(a.grad[:, 3], torch.zeros(2 if "use_dora" in options else 3))


def test_initial_values(jit):
    for init, zero in ((True, True), ("gaussian", True), (False, False)):
        options = {"r": 8, "target_modules": ["0"], "init_lora_weights": init}
        model = nn.Sequential(nn.Embedding(400, 64))
        compiled = thunder.jit(model, transforms=tx.registry.resolve(["lora"], options={"lora": options}))
        p = dict(compiled.named_parameters())
        a, b = p["0.lora_embedding_A.default"], p["0.lora_embedding_B.default"]
        assert (a.shape, b.shape) == ((8, 400), (64, 8))
        assert b.std().item() == pytest.approx(1, rel=0.15)
        assert a.std().item() == pytest.approx(0 if zero else 1, rel=0.1)


@pytest.mark.parametrize("targets", [["tokens"], ["tokens", "head"]])
def test_tied_to_a_head_each_learns_its_own(jit, peft_of, backward_both, tmp_path, targets):
    model, tokens = Tied(), batch()
    options = {"target_modules": targets, "r": 2}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)
    ours = backward_both(compiled, reference, tokens, torch.sum, atol=1e-5, rtol=1e-6)
    handle = tx.handle(compiled)
    with pytest.raises(tx.errors.PipelineError, match=r"'tokens' cannot be merged: 'head' shares the weight"):
        handle.plugin("lora").merge()
    with pytest.raises(tx.errors.CheckpointError, match=r"'tokens' no longer has .* shares with 'head'"):
        handle.state_dict()
    save_peft(handle, tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    torch.testing.assert_close(again(tokens), ours, atol=1e-6, rtol=0)


def test_full_states_reset_the_adapter(jit):
    for dora in (False, True):
        model, other, tokens = Net(), Net(), batch()
        compiled = jit(model, r=2, target_modules=NAMES, use_dora=dora)
        assert not torch.allclose(compiled(tokens), model(tokens), atol=1e-3)
        tx.handle(compiled).load_state_dict(other.state_dict())
        torch.testing.assert_close(compiled(tokens), other(tokens), atol=1e-6, rtol=1e-6)
        compiled(tokens).sum().backward()
        moved = [n for n, p in compiled.named_parameters() if p.grad is not None and p.grad.abs().max() > 0]
        assert any("lora_embedding_A" in name for name in moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(jit, peft_of, dtype):
    model, tokens = Net().to(dtype), batch()
    options = {"target_modules": NAMES, "r": 2}
    compiled = jit(model, **options)
    reference = peft_of(model, compiled, **options)  # Compares the adapters' dtypes, too.
    torch.testing.assert_close(compiled(tokens), reference(tokens), atol=0, rtol=0)


@pytest.mark.parametrize("odd", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_what_thunder_cannot_compile_is_refused(odd):
    (name, value), *_ = odd.items()
    pipeline = tx.registry.resolve(["lora"], options={"lora": {"r": 2, "target_modules": ["0"]}})
    with pytest.raises(tx.errors.OptionError, match=rf"'0' has {name}={value}, which Thunder cannot compile"):
        thunder.jit(nn.Sequential(nn.Embedding(5, 4, **odd)), transforms=pipeline)


class LanguageModel(nn.Module):
    """PEFT saves the embedding of such a model along with the adapter."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.lm_head = nn.Linear(4, 7)

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, tokens):
        return self.lm_head(self.embed_tokens(tokens))


def test_files_with_the_embedding_itself(jit, peft_of, tmp_path):
    model, tokens = LanguageModel(), torch.randint(0, 7, (2, 3))
    options = {"target_modules": ["embed_tokens", "lm_head"], "r": 2}
    compiled = jit(model, **options)
    peft_of(model, compiled, **options).save_pretrained(tmp_path)
    assert "base_model.model.embed_tokens.base_layer.weight" in load_file(tmp_path / "adapter_model.safetensors")
    other = LanguageModel()
    for base, fits in ((model, True), (other, False), (other.to("meta"), False)):
        pipeline = tx.registry.resolve(["lora"], options={"lora": peft_options(tmp_path)})
        again = thunder.jit(base, transforms=pipeline)
        if fits:
            load_peft(tx.handle(again), tmp_path)
            torch.testing.assert_close(again(tokens), compiled(tokens), atol=0, rtol=0)
        else:
            problem = r"brings the model's own '.*base_layer\..*', (with other values|which cannot be compared)"
            with pytest.raises(tx.errors.CheckpointError, match=problem):
                load_peft(tx.handle(again), tmp_path)
