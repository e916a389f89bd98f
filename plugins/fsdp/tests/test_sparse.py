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


class Called(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Linear(4, 6)

    def forward(self, x):
        return torch.nn.functional.embedding(x, self.table.weight * 1, sparse=True)


FUNCTIONAL = (
    "The model calls embedding with sparse=True, whose gradients ranks cannot reduce. Call it with sparse=False, or on "
    "a detached weight."
)


def called(plugin):
    import thunder

    torch.manual_seed(0)
    model, x = Called(), torch.tensor([1, 2, 1])
    jitted = thunder.jit(model, transforms=tx.registry.resolve([plugin]))
    with pytest.raises(tx.errors.PipelineError) as raised:
        jitted(x)
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), model(x))
    return str(raised.value)


def test_sparse_calls_are_refused_where_gradients_are_reduced(ranks):
    for plugin in ("ddp", "fsdp"):
        assert ranks.run(called, plugin) == [FUNCTIONAL] * 2


@pytest.mark.parametrize("sparse", [True, False])
def test_without_ranks_gradients_are_sparse_as_in_eager(sparse):
    """Layer and function, in a pipeline without distribution."""
    import copy

    import thunder

    from thunder_xform.testing import pipeline_of

    torch.manual_seed(0)
    plain, x = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=sparse)), torch.tensor([1, 2, 1])
    if not sparse:
        plain[0].forward = lambda x, layer=plain[0]: torch.nn.functional.embedding(x, layer.weight, sparse=True)
    reference = torch.nn.Embedding(5, 3, sparse=True)
    reference.load_state_dict(copy.deepcopy(plain[0].state_dict()))
    model = thunder.jit(plain, transforms=pipeline_of(same=tx.Plugin(None)))
    for m in (model, reference):
        m(x).square().sum().backward()
    found, expected = model.get_parameter("0.weight").grad, reference.weight.grad
    assert found.layout is torch.sparse_coo
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
    optimizers = [torch.optim.SparseAdam(m.parameters(), lr=0.1) for m in (model, reference)]
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(model.get_parameter("0.weight").detach(), reference.weight.detach())
