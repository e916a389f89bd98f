"""V10: sparse gradients are refused by name, before anything has changed."""

import pytest
import torch

import thunder_xform as tx

TEXT = "'0' is an {} with sparse=True, whose gradients ranks cannot reduce. Make it with sparse=False, or freeze it."


def refused(plugin, kind):
    import thunder

    model = torch.nn.Sequential(getattr(torch.nn, kind)(4, 4, sparse=True), torch.nn.Linear(4, 4))
    with pytest.raises(tx.errors.PipelineError) as raised:
        thunder.jit(model, transforms=tx.registry.resolve([plugin]))
    return str(raised.value)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_sparse_embeddings_are_refused(ranks, plugin, kind):
    assert ranks.run(refused, plugin, kind) == [TEXT.format(kind)] * 2
