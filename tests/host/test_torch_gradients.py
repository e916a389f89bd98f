"""V12, V33: gradients of complex operators and of losses that are not averaged are those of eager PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder_xform as tx
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip

COMPLEX = torch.complex64


class Model(nn.Module):
    def __init__(self, fn, weight):
        super().__init__()
        self.fn, self.w = fn, nn.Parameter(weight.clone())

    def forward(self, x):
        return self.fn(x, self.w)


def check(fn, weight, x):
    results = []
    for jit in (lambda m: m, lambda m: thunder.jit(m, transforms=pipeline_of(same=tx.Plugin(None)))):
        model, given = jit(Model(fn, weight)), x.clone().requires_grad_()
        out = model(given)
        real = torch.view_as_real(out) if out.is_complex() else out
        (real * torch.linspace(-1, 2, real.numel(), dtype=real.dtype).view(real.shape)).sum().backward()
        results.append((out.detach(), given.grad, next(iter(model.parameters())).grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


CASES = {
    "mul": lambda x, w: x * w,
    "mul, div, add, sub": lambda x, w: (x * 2 + w) / w - w * (1 + 2j) * x,
    "abs": lambda x, w: (x * w).abs() + w.abs(),
    "parts": lambda x, w: (x * w).real + (w * w.conj()).imag + torch.view_as_real(x * w).sum(-1),
    "fft": lambda x, w: torch.fft.ifft(torch.fft.fft(x) * w),
    "rfft": lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * w[:2], n=3),
    "exp, pow, sin": lambda x, w: torch.exp(x * w) + torch.sin(w) ** 2,
    "cat, index, reshape": lambda x, w: torch.cat([x * w, w[None]])[:, [0, 2, 1]].reshape(-1),
    "to": lambda x, w: (x.to(COMPLEX) * w.to(torch.complex128)).mean(0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, COMPLEX], ids=str)
def test_complex_parameters(case, dtype):
    if case == "rfft" and dtype is COMPLEX:
        pytest.skip("rfft takes real numbers")
    torch.manual_seed(0)
    check(CASES[case], torch.randn(3, dtype=COMPLEX), torch.randn(2, 3, dtype=dtype))


def test_complex_matrices_and_real_parameters():
    torch.manual_seed(0)
    square, x = torch.randn(3, 3, dtype=COMPLEX), torch.randn(2, 3, dtype=COMPLEX)
    check(lambda x, w: torch.tanh(F.linear(x, w)) @ w, square, x)
    check(lambda x, w: torch.einsum("bi,ij->bj", x.to(COMPLEX), w), square, x.real)
    check(lambda x, w: x * w, torch.randn(3), x)
    check(lambda x, w: torch.view_as_complex(w) * x, torch.randn(3, 2), x)


TARGET, WEIGHT = torch.tensor([0, 3, 1, 3, 2]), torch.tensor([1.0, 2.0, 0.5, 1.5])
LOSSES = {
    "sum": lambda h: F.cross_entropy(h, TARGET, reduction="sum"),
    "none": lambda h: F.cross_entropy(h, TARGET, reduction="none").square(),
    "ignored": lambda h: F.cross_entropy(h, TARGET, reduction="sum", ignore_index=3),
    "weighted": lambda h: F.cross_entropy(h, TARGET, WEIGHT.to(h.dtype), reduction="sum"),
    "smoothed": lambda h: F.cross_entropy(h, TARGET, reduction="sum", label_smoothing=0.1),
    "nll": lambda h: F.nll_loss(h.log_softmax(1), TARGET, reduction="sum", ignore_index=1),
    "nll, none": lambda h: F.nll_loss(h.log_softmax(1), TARGET, WEIGHT.to(h.dtype), reduction="none"),
    "mean": lambda h: F.cross_entropy(h, TARGET),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_over_classes(loss, dtype):
    torch.manual_seed(0)
    check(lambda x, w: LOSSES[loss](F.linear(x, w)), torch.randn(4, 3, dtype=dtype), torch.randn(5, 3, dtype=dtype))
