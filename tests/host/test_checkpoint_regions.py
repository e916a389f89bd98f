"""``torch.utils.checkpoint`` of either kind (V17): eager PyTorch's gradients, and one mask for forward and backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import thunder_xform as tx

import thunder  # isort: skip


def one(m, x):
    return checkpoint(m.block, x, use_reentrant=True)


def default(m, x):
    return checkpoint(m.block, x, use_reentrant=True, preserve_rng_state=False)


def several(m, x):
    return checkpoint(lambda a, b: (m.block(a) * b).tanh(), x, x * 2, use_reentrant=True)


def keywords(m, x):
    return checkpoint(lambda a, *, scale, shift: m.block(a) * scale + shift, x, scale=x, shift=2.0, use_reentrant=False)


def sequential(m, x):
    return checkpoint_sequential(m.block, 2, x, use_reentrant=True)


class Checkpoints(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.GELU())
        self.how = how

    def forward(self, x):
        return self.how(self, x)


@pytest.mark.parametrize("how", [one, default, several, keywords, sequential])
def test_both_kinds_have_eager_gradients(how):
    torch.manual_seed(0)
    plain = Checkpoints(how)
    model = thunder.jit(copy.deepcopy(plain), transforms=tx.registry.resolve([]))
    # Of an input without a gradient, eager PyTorch's reentrant kind gives none to the parameters.
    x = torch.randn(4, 3, requires_grad=True)
    plain(x).square().sum().backward()
    expected, x.grad = x.grad, None
    model(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_the_mask_is_one():
    def dropped(m, x):
        return checkpoint(lambda a: F.dropout(a, 0.5), x, use_reentrant=True)

    model = thunder.jit(Checkpoints(dropped), transforms=tx.registry.resolve([]))
    x = torch.ones(64, requires_grad=True)
    y = model(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())
