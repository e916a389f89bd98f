"""Schemes on tensors: against bitsandbytes, against their definitions, and how far they are from float weights."""

from __future__ import annotations

import bitsandbytes.functional
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thunder_xform_quant.fourbit import FP4, NF4
from thunder_xform_quant.int8 import Int8

FOUR_BITS = {"nf4": NF4, "fp4": FP4}
SCHEMES = {
    "nf4": NF4(),
    "nf4, blocks of 32": NF4(blocksize=32),
    "nf4, double": NF4(double_quant=True),
    "fp4": FP4(),
    "fp4, double": FP4(double_quant=True),
    "int8": Int8(),
}
shapes = st.tuples(st.integers(1, 9), st.integers(1, 150))


def weight_of(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_definition(weight, quant_type, blocksize):
    """Each block of a row scaled to a largest magnitude of 1, then rounded to the nearest of the 16 values."""
    values = bitsandbytes.functional.get_4bit_type(quant_type, device="cpu").double()
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.double(), (0, -columns % blocksize)).view(rows, -1, blocksize)
    scale = padded.abs().amax(-1, keepdim=True)
    nearest = values[(padded / scale)[..., None].sub(values).abs().argmin(-1)]
    return (nearest * scale).view(rows, -1)[:, :columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("quant_type", FOUR_BITS)
def test_codes_scales_and_values_are_those_of_bitsandbytes(quant_type, double_quant, dtype):
    weight = weight_of((40, 512), dtype)
    scheme = FOUR_BITS[quant_type](double_quant=double_quant)
    packed = scheme.quantize(weight)
    codes, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=64, quant_type=quant_type, compress_statistics=double_quant
    )
    assert packed.codes.shape == (40, 256)
    assert packed.rows["absmax"].shape == (40, 8)
    assert torch.equal(packed.codes.view(-1, 1), codes)
    assert torch.equal(packed.rows["absmax"].view(-1), state.absmax)
    expected = bitsandbytes.functional.dequantize_4bit(codes, state)
    assert torch.equal(scheme.dequantize(packed, (40, 512), dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("quant_type", FOUR_BITS)
def test_the_product_and_its_gradient_are_those_of_bitsandbytes(quant_type, double_quant, dtype):
    weight, bias = weight_of((24, 128), dtype), weight_of((24,), dtype, 1)
    x = weight_of((3, 5, 128), dtype, 2).requires_grad_()
    upstream = weight_of((3, 5, 24), dtype, 3)
    scheme = FOUR_BITS[quant_type](double_quant=double_quant)
    packed = scheme.quantize(weight)
    codes, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=64, quant_type=quant_type, compress_statistics=double_quant
    )
    expected = bitsandbytes.matmul_4bit(x, codes, state, bias=bias)
    expected.backward(upstream)
    with torch.no_grad():
        assert torch.equal(scheme.linear(x.detach(), packed, (24, 128), bias), expected)
        assert torch.equal(scheme.input_gradient(upstream, packed, (24, 128)), x.grad)


@settings(deadline=None, max_examples=40)
@given(shape=shapes, seed=st.integers(0, 2**32 - 1), quant_type=st.sampled_from(list(FOUR_BITS)))
def test_rows_of_any_length_follow_the_definition(shape, seed, quant_type):
    weight = weight_of(shape, seed=seed)
    scheme = FOUR_BITS[quant_type](blocksize=32)
    packed = scheme.quantize(weight)
    assert packed.codes.shape == (shape[0], (shape[1] + 1) // 2)
    found = scheme.dequantize(packed, shape, torch.float64)
    # Where two values are equally near, rounding decides: compare how far they are from the weight.
    expected = by_definition(weight, quant_type, 32)
    torch.testing.assert_close((found - weight).abs(), (expected - weight).abs(), atol=1e-6, rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(shape=shapes, seed=st.integers(0, 2**32 - 1), name=st.sampled_from(["nf4", "fp4", "int8"]))
def test_rows_are_independent_and_packing_again_changes_nothing(shape, seed, name):
    weight, scheme = weight_of(shape, seed=seed), SCHEMES[name]
    packed = scheme.quantize(weight)
    some = scheme.quantize(weight[shape[0] // 2 :])
    assert torch.equal(some.codes, packed.codes[shape[0] // 2 :])
    for part, rows in some.rows.items():
        assert torch.equal(rows, packed.rows[part][shape[0] // 2 :])
    values = scheme.dequantize(packed, shape, torch.float32)
    again = scheme.dequantize(scheme.quantize(values), shape, torch.float32)
    torch.testing.assert_close(again, values, atol=0, rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
def test_int8_is_off_by_half_a_step_at_most(shape, seed):
    weight = weight_of(shape, seed=seed)
    packed = Int8().quantize(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    off = (Int8().dequantize(packed, shape, torch.float64) - weight).abs()
    assert bool((off <= step.double() * 0.5 * (1 + 1e-5)).all())


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_rows_of_zeros_stay_zeros(scheme):
    weight = weight_of((6, 64))
    weight[2] = 0
    found = scheme.dequantize(scheme.quantize(weight), (6, 64), torch.float32)
    # Double quantization moves the scale of a block, by less than half its step of 1/128 of the largest.
    assert found[2].abs().max() <= (0.02 if "double_quant=True" in repr(scheme) else 0)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [128, 75])
def test_product_and_gradient_follow_the_dequantized_weight(scheme, dtype, width):
    weight, bias = weight_of((10, width), dtype), weight_of((10,), dtype, 1)
    packed = scheme.quantize(weight)
    dense = scheme.dequantize(packed, (10, width), torch.float32).double()
    x, upstream = weight_of((7, width), dtype, 2), weight_of((7, 10), dtype, 3)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype != torch.bfloat16 else {"atol": 0.15, "rtol": 0.02}
    product = scheme.linear(x, packed, (10, width), bias)
    gradient = scheme.input_gradient(upstream, packed, (10, width))
    assert product.dtype == gradient.dtype == dtype
    expected = torch.nn.functional.linear(x.double(), dense, bias.double())
    torch.testing.assert_close(product.double(), expected, **tolerance)
    torch.testing.assert_close(gradient.double(), upstream.double() @ dense, **tolerance)
    assert scheme.linear(x[0], packed, (10, width), None).shape == (10,)


@pytest.mark.parametrize(
    ("scheme", "error", "bits"),
    [
        (NF4(), (0.085, 0.095), 4.5),
        (NF4(double_quant=True), (0.085, 0.095), 4.127),
        (FP4(), (0.115, 0.125), 4.5),
        (FP4(double_quant=True), (0.115, 0.125), 4.127),
        (Int8(), (0.005, 0.009), 8.032),
    ],
    ids=repr,
)
def test_accuracy_and_size(scheme, error, bits, record_property):
    """Relative error of normally distributed weights, in the Frobenius norm, and bits a weight."""
    weight = weight_of((512, 1024))
    packed = scheme.quantize(weight)
    found = (scheme.dequantize(packed, (512, 1024), torch.float32) - weight).norm() / weight.norm()
    record_property("relative error", found.item())
    print(f"{scheme!r}: relative error {found:.4f}, {packed.nbytes * 8 / weight.numel():.3f} bits a weight")
    assert error[0] < found < error[1]
    assert packed.nbytes * 8 / weight.numel() == pytest.approx(bits, abs=0.002)


@pytest.mark.parametrize("blocksize", [0, 48, 8192])
def test_other_block_sizes_are_refused(blocksize):
    with pytest.raises(ValueError, match=f"`blocksize` is {blocksize}; it is one of 32, 64"):
        NF4(blocksize=blocksize)
