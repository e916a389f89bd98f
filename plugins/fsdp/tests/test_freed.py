"""V32: a sharded or replicated model that nobody uses any more is freed, with its shards and stashed gradients."""

import gc
import weakref

import pytest
import torch

import thunder_xform as tx

pytest.importorskip("thunder_xform_ddp", reason="needs the plugin ddp")
pytest.importorskip("thunder_xform_lora", reason="needs the plugin lora")


def alive(request, uses):
    """What is left of a model after each way of using it."""
    import thunder

    left = []
    for use in uses:
        plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
        model = thunder.jit(plain, transforms=tx.registry.resolve(request))
        if use == "forward":
            model(torch.ones(3, 4))
        if use in ("accumulated", "trained"):
            with model.no_sync():
                model(torch.ones(3, 4)).sum().backward()
        if use == "trained":
            model(torch.ones(3, 4)).sum().backward()
        references = [weakref.ref(o) for o in (plain, model, tx.handle(model)._session, *model.parameters())]
        del plain, model
        for _ in range(2):  # What autograd nodes refer to is garbage once they are gone.
            gc.collect()
        left += [(use, type(found).__name__) for ref in references if (found := ref()) is not None]
    return left


@pytest.mark.parametrize("request_", ["fsdp(zero=3)", "fsdp(zero=2) + lora(r=1)", "ddp"])
def test_v32_a_deleted_model_is_freed(ranks, request_):
    assert ranks.run(alive, request_, ["untouched", "forward", "accumulated", "trained"]) == [[], []]
