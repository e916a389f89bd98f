"""Attention on CPU against eager PyTorch, which runs the same kernel: exactly, where it does."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import thunder_xform as tx

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def qkv(batch=2, heads=3, queries=5, keys=5, width=8, dtype=torch.float32):
    return {
        "q": torch.randn(batch, heads, queries, width, dtype=dtype),
        "k": torch.randn(batch, heads, keys, width, dtype=dtype),
        "v": torch.randn(batch, heads, keys, width, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(like_eager, causal, dtype):
    ran = like_eager(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), **qkv(dtype=dtype))
    assert ran.count("aten_attention") == ran.count("aten_attention_backward") == 1


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (1, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_and_scales(like_eager, causal, queries, keys, scale):
    ran = like_eager(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale),
        **qkv(queries=queries, keys=keys),
    )
    assert "aten_attention" in ran


SHAPES = [(5, 7), (1, 7), (2, 3, 5, 7), (1, 1, 5, 7), (2, 1, 1, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boolean_masks(like_eager, shape):
    mask = torch.rand(shape) > 0.3
    mask[..., -1, :] = False  # A query without any key.
    ran = like_eager(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), **qkv(keys=7), mask=mask
    )
    assert "aten_attention" in ran


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_that_are_added(like_eager, shape):
    ran = like_eager(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        trains={"q", "k", "v"},
        **qkv(keys=7),
        mask=torch.randn(shape),
    )
    assert "aten_attention" in ran
    assert "aten_attention_mask_gradient" not in ran


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_of_a_mask(like_eager, dtype, shape):
    """A learned bias, and one that is computed from a parameter: eager PyTorch leaves its kernel for these."""
    for computed in (False, True):
        ran = like_eager(
            lambda q, k, v, mask, computed=computed: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask * 2 if computed else mask, scale=0.7
            ),
            atol=2e-6,
            rtol=1e-6,
            **qkv(keys=7, dtype=dtype),
            mask=torch.randn(shape, dtype=dtype),
        )
        assert "aten_attention_mask_gradient" in ran


def test_heads_that_are_views(like_eager):
    """Strides as models make them, and rows that are not contiguous."""

    def attend(x):
        q, k, v = x.view(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 32)

    ran = like_eager(attend, x=torch.randn(2, 5, 96))
    assert ran.count("aten_attention") == ran.count("aten_unbind") == 1
    like_eager(
        lambda q, k, v: F.scaled_dot_product_attention(q.mT, k.mT, v.mT), atol=1e-6, **qkv(queries=6, keys=6, width=4)
    )


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 40)] * 2, st.integers(1, 20)),
    causal=st.booleans(),
    trains=st.sets(st.sampled_from("qkv")),
    scale=st.none() | st.floats(0.01, 2),
)
def test_any_shape(like_eager, sizes, causal, trains, scale):
    like_eager(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale), trains, **qkv(*sizes)
    )


def left(name, fn, like_eager, **tensors):
    assert name not in like_eager(fn, atol=1e-5, rtol=1e-5, **tensors)


def test_calls_that_the_kernel_does_not_take(like_eager):
    """Values of another width, three dimensions, masks of one: left to Thunder."""
    wide = qkv() | {"v": torch.randn(2, 3, 5, 6)}
    left("aten_attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), like_eager, **wide)
    flat = {name: x[0] for name, x in qkv().items()}
    left("aten_attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), like_eager, **flat)
    left(
        "aten_attention",
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        like_eager,
        **qkv(),
        mask=torch.randn(3, 5, 5),
    )


def test_dropout_is_left_to_thunder(calls, ran):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    compiled = thunder.jit(calls(attend, qkv(), None), transforms=tx.registry.resolve(["aten"]))
    first, second = compiled(), compiled()
    assert not torch.equal(first, second)
    assert "aten_attention" not in ran(compiled)


def test_autocast(like_eager):
    with torch.autocast("cpu", torch.bfloat16):
        ran = like_eager(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-2, rtol=1e-2, **qkv()
        )
    assert "aten_attention" in ran
