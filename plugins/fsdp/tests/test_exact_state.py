"""A lower precision on the wire of gathers is not one of checkpoints, nor of what packed weights consist of."""

from importlib.util import find_spec

import pytest
import torch

needs_quant = pytest.mark.skipif(find_spec("thunder_xform_quant") is None, reason="needs the plugin quant")


def state(options):
    import thunder

    import thunder_xform as tx

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 6, bias=False))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    jitted = thunder.jit(model, transforms=tx.registry.resolve(list(options), options=options))
    return expected, tx.handle(jitted).state_dict()


def test_full_state_is_exact_whatever_travels_in_training(ranks):
    for expected, found in ranks.run(state, {"fsdp": {"gather_dtype": "bfloat16"}}):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs_quant
def test_scales_of_packed_weights_are_not_rounded(ranks):
    quantized = {"quant": {"scheme": "int8"}, "fsdp": {"gather_dtype": "bfloat16"}}
    narrow = ranks.run(state, quantized)
    wide = ranks.run(state, quantized | {"fsdp": {}})
    for (_, found), (_, exact) in zip(narrow, wide, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=0)


def scales():
    """What the compiled model computes with packed weights, under both dtypes on the wire."""
    import thunder

    import thunder_xform as tx

    outputs = []
    for options in ({}, {"gather_dtype": "bfloat16"}):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 16, bias=False)
        pipeline = tx.registry.resolve(["quant", "fsdp"], options={"quant": {"scheme": "int8"}, "fsdp": options})
        outputs.append(thunder.jit(model, transforms=pipeline)(torch.ones(2, 8)).detach())
    return outputs


@needs_quant
def test_packed_weights_compute_the_same_whatever_travels(ranks):
    for wide, narrow in ranks.run(scales):
        torch.testing.assert_close(narrow, wide, rtol=0, atol=0)
