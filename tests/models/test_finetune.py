"""Models as they are published, fine-tuned with adapters on 4-bit weights, sharded over two ranks (U10).

Held against the same training in one process, without shards on the batch of both ranks, and against PEFT's eager
training of the same adapters on bitsandbytes' own 4-bit layers.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import thunder_xform as tx
from thunder_xform.testing import RankPool

for _needed in ("bitsandbytes", "litgpt", "peft", "transformers"):
    pytest.importorskip(_needed)
for _plugin in ("fsdp", "lora", "quant"):
    pytest.importorskip(f"thunder_xform_{_plugin}", reason=f"needs the plugin {_plugin}")

# Thunder interprets every line of a model's Python: that takes most of the time, twice at once on the ranks.
pytestmark = pytest.mark.timeout(900)

WORLD, STEPS, ROWS, LENGTH, VOCABULARY = 2, 15, 2, 16, 128
LAYERS, WIDTH, HIDDEN, HEADS, GROUPS = 2, 64, 128, 4, 2
LORA = {"r": 4, "lora_alpha": 16, "exclude_modules": ("lm_head",)}
QUANTIZED_BY_LAYER = {"litgpt": 5, "llama": 7}


def built(kind, seed):
    """A model with random weights."""
    torch.manual_seed(seed)
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            max_position_embeddings=LENGTH,
            # The default, 0.02, makes a model so narrow say nothing: rounding errors would decide where it goes.
            initializer_range=0.1,
            use_cache=False,
        )
        return LlamaForCausalLM(config)
    from litgpt import GPT, Config

    config = Config.from_name(
        "Llama-2-7b-hf",
        n_layer=LAYERS,
        n_embd=WIDTH,
        intermediate_size=HIDDEN,
        n_head=HEADS,
        n_query_groups=GROUPS,
        padded_vocab_size=VOCABULARY,
        block_size=LENGTH,
    )
    return GPT(config)


def outcome(kind, model, tokens):
    """Logits, and the mean loss over all next tokens: Llama's own, or as litgpt computes it outside of its models."""
    if kind == "llama":
        found = model(input_ids=tokens, labels=tokens)
        return found.logits, found.loss
    logits = model(tokens)
    return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches():
    """Counting by threes from anywhere: of each step, a batch for every rank."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, VOCABULARY, (STEPS + 1, WORLD, ROWS, 1), generator=generator)
    return (starts + 3 * torch.arange(LENGTH)) % VOCABULARY


def trained(kind, model, steps):
    """Losses of training on one batch after the other, then the logits of a batch that was not trained on."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    losses = []
    for tokens in steps[:-1]:
        _, loss = outcome(kind, model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, probe(kind, model, steps[-1])


def probe(kind, model, tokens):
    with torch.no_grad():
        return outcome(kind, model, tokens)[0].clone()


def jitted(model, request, **options):
    import thunder

    return thunder.jit(model, transforms=tx.registry.resolve(request, options=options))


def on_a_rank(kind, folder):
    """Train shards; leaves the adapter in files, as it was at the start and as it is in the end."""
    from thunder_xform_lora import save_peft

    plain = built(kind, seed=dist.get_rank())  # All ranks train rank 0's.
    before = copy.deepcopy(plain.state_dict())
    model = jitted(plain, ["quant", "lora", "fsdp"], lora=LORA)
    handle = tx.handle(model)
    tx.checkpoint.save_adapter(handle, folder / "first.safetensors")
    save_peft(handle, folder / "first")
    losses, logits = trained(kind, model, batches()[:, dist.get_rank()])
    tx.checkpoint.save_adapter(handle, folder / "last.safetensors")
    save_peft(handle, folder / "last")
    torch.testing.assert_close(plain.state_dict(), before, rtol=0, atol=0)
    kinds = {name: (parameter.dtype, parameter.requires_grad) for name, parameter in handle.parameters.items()}
    return losses, logits, handle.state_dict("adapter"), kinds


@pytest.fixture(scope="module", params=["litgpt", "llama"])
def run(request, tmp_path_factory):
    """What each rank found, and where the files are."""
    folder = tmp_path_factory.mktemp(request.param)
    with RankPool(WORLD, timeout=600) as pool:
        return request.param, folder, pool.run(on_a_rank, request.param, folder)


@pytest.fixture
def peft(run):
    """``peft("last")``: bitsandbytes' layers, with the adapter of that file read by PEFT."""
    import bitsandbytes
    from peft import PeftModel

    kind, folder, _ = run

    def load(name):
        base = built(kind, seed=0)
        for path, layer in list(base.named_modules()):
            if isinstance(layer, torch.nn.Linear) and path != "lm_head":
                packed = bitsandbytes.nn.Linear4bit(
                    layer.in_features, layer.out_features, bias=False, compress_statistics=False, quant_type="nf4"
                )
                packed.load_state_dict(layer.state_dict())
                # bitsandbytes quantizes on the way to a device.
                base.set_submodule(path, packed.to("cpu"))
        base.is_loaded_in_4bit = True
        return PeftModel.from_pretrained(base, folder / name, is_trainable=True)

    return load


def together(losses):
    """The loss over the ranks' batches, which are of one size."""
    return torch.tensor(losses).mean(0).tolist()


def test_the_loss_falls_and_only_adapters_train(run):
    kind, _, results = run
    for losses, _, adapter, kinds in results:
        assert losses[-1] < losses[0] - 0.5, losses
        assert {name for name, (_, trains) in kinds.items() if trains} == adapter.keys()
        packed = [name for name, (dtype, _) in kinds.items() if dtype == torch.uint8]
        assert len(packed) == LAYERS * QUANTIZED_BY_LAYER[kind]
        assert len(adapter) == 2 * len(packed)


def test_ranks_agree(run):
    _, _, ((_, first, adapter, kinds), (_, second, other_adapter, other_kinds)) = run
    assert first.shape == second.shape == (ROWS, LENGTH, VOCABULARY)
    assert kinds == other_kinds
    torch.testing.assert_close(adapter, other_adapter, rtol=0, atol=0)


def test_one_process_without_shards(run):
    """A fresh pipeline, which loads the adapter that the ranks trained, and then the one that they started from."""
    kind, folder, results = run
    request = tx.checkpoint.adapter_request(folder / "last.safetensors")
    model = jitted(built(kind, seed=0), ["quant", *request])
    tx.checkpoint.load_adapter(tx.handle(model), folder / "last.safetensors")
    found = probe(kind, model, batches()[-1].flatten(0, 1))
    torch.testing.assert_close(found, torch.cat([logits for _, logits, *_ in results]), rtol=1e-5, atol=1e-5)

    tx.checkpoint.load_adapter(tx.handle(model), folder / "first.safetensors")
    losses, _ = trained(kind, model, batches().flatten(1, 2))
    assert losses == pytest.approx(together([losses for losses, *_ in results]), abs=1e-5)


def test_peft_in_eager(run, peft):
    kind, _, results = run
    losses, _ = trained(kind, peft("first"), batches().flatten(1, 2))
    assert losses == pytest.approx(together([losses for losses, *_ in results]), abs=1e-5)
    found = probe(kind, peft("last"), batches()[-1].flatten(0, 1))
    torch.testing.assert_close(found, torch.cat([logits for _, logits, *_ in results]), rtol=1e-5, atol=1e-5)
