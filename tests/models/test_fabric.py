"""litgpt's GPT trained whole, in shards, through Lightning Fabric on two ranks, against plain PyTorch in one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from thunder_xform.testing import RankPool, torchrun_environment

for _needed in ("litgpt", "lightning", "thunder_xform_fabric", "thunder_xform_fsdp"):
    pytest.importorskip(_needed)

pytestmark = pytest.mark.timeout(900)

WORLD, STEPS, ACCUMULATE, ROWS, LENGTH, VOCABULARY, MAX_NORM = 2, 6, 2, 2, 12, 96, 0.5


def built(seed):
    from litgpt import GPT, Config

    torch.manual_seed(seed)
    # As Pythia: biases, LayerNorm and rotary embeddings of a part of each head.
    config = Config.from_name(
        "pythia-14m", n_layer=2, n_embd=32, n_head=4, padded_vocab_size=VOCABULARY, block_size=LENGTH
    )
    return GPT(config)


def batches():
    """``[step, microbatch, rank, row, token]``: sequences that repeat a pair of tokens."""
    generator = torch.Generator().manual_seed(2)
    pairs = torch.randint(0, VOCABULARY, (STEPS, ACCUMULATE, WORLD, ROWS, 2), generator=generator)
    return pairs.repeat(1, 1, 1, 1, LENGTH // 2)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model):
    # The gradient of a bias of keys is zero but for rounding, which a smaller eps would make steps of.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def plain():
    """Losses ``[rank][call]``, norms of gradients and final weights of eager PyTorch over both ranks' data."""
    model = built(0)
    optimizer = optimizer_of(model)
    losses, norms = [[] for _ in range(WORLD)], []
    for step in batches():
        for microbatch in step:
            for rank, tokens in enumerate(microbatch):
                loss = loss_of(model, tokens) / ACCUMULATE
                (loss / WORLD).backward()
                losses[rank].append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def on_a_rank(path):
    from lightning.fabric import Fabric

    from thunder_xform_fabric import ThunderFSDPStrategy

    os.environ.update(torchrun_environment())
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=ThunderFSDPStrategy(state_dict_type="full"))
    fabric.launch()
    model = built(dist.get_rank())  # All ranks train rank 0's.
    model, optimizer = fabric.setup(model, optimizer_of(model))
    shards = sum(p.to_local().numel() for p in model.parameters())
    losses, norms = [], []
    for step in batches()[:, :, dist.get_rank()]:
        for number, tokens in enumerate(step, start=1):
            with fabric.no_backward_sync(model, enabled=number < ACCUMULATE):
                loss = loss_of(model, tokens) / ACCUMULATE
                fabric.backward(loss)
            losses.append(loss.item())
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, {"model": model})
    return losses, norms, shards


def test_litgpt_through_fabric(tmp_path):
    """U20: losses, norms and weights are PyTorch's; the file is one that litgpt loads."""
    losses, norms, weights = plain()
    with RankPool(WORLD, timeout=600) as ranks:
        results = ranks.run(on_a_rank, tmp_path / "lit_model.pth")
    assert losses[0][-1] < losses[0][0] - 0.1
    for rank, (found, found_norms, _) in enumerate(results):
        assert found == pytest.approx(losses[rank], abs=2e-6)
        assert found_norms == pytest.approx(norms, rel=1e-5)
    whole = sum(tensor.numel() for tensor in built(0).parameters())
    assert sum(shards for *_, shards in results) == whole
    saved = torch.load(tmp_path / "lit_model.pth", weights_only=True)["model"]
    torch.testing.assert_close(saved, dict(weights), atol=1e-5, rtol=0)
    built(1).load_state_dict(saved)
