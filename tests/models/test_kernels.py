"""Models as they are published on PyTorch's own kernels: exactly what eager PyTorch computes, which calls the same."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import thunder_xform as tx
from thunder_xform.testing import run_ranks

for _needed in ("litgpt", "transformers"):
    pytest.importorskip(_needed)
pytest.importorskip("thunder_xform_aten", reason="needs the plugin aten")

# Thunder interprets every line of a model's Python.
pytestmark = pytest.mark.timeout(900)

VOCABULARY, LENGTH = 96, 12


def gpt(name, **sizes):
    from litgpt import GPT, Config

    return GPT(Config.from_name(name, n_layer=1, n_embd=32, n_head=4, padded_vocab_size=VOCABULARY, **sizes))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


MODELS = {
    "pythia": (lambda: gpt("pythia-14m", block_size=LENGTH), {"aten_attention", "aten_gelu", "aten_layer_norm"}),
    "llama": (llama, {"aten_attention", "aten_silu"}),
}


def logits(model, tokens):
    out = model(tokens)
    return getattr(out, "logits", out)


def agrees(kind):
    import thunder

    make, kernels = MODELS[kind]
    torch.manual_seed(0)
    model, tokens = make(), torch.randint(0, VOCABULARY, (2, LENGTH))
    compiled = thunder.jit(copy.deepcopy(model), transforms=tx.registry.resolve(["aten"]))
    found, expected = logits(compiled, tokens), logits(model, tokens)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    for out in (found, expected):
        F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).grad, parameter.grad, atol=1e-7, rtol=1e-5)
    forward, backward = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
    ran = {bsym.sym.name for trace in (forward, backward) for bsym in trace.bound_symbols}
    assert kernels <= ran
    assert not ran & {"softmax", "where", "erf"}, ran


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_are_those_of_eager(kind):
    # In a process of its own: litgpt makes modules in its forward, and once anything was compiled by torch in the
    # process, making a module goes through a registry that Thunder may trip over.
    run_ranks(agrees, 1, kind, timeout=600)
