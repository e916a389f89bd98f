"""V03: operators in place, whose weights are gathered, recomputed and adapted by plugins, have eager's gradients."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import thunder_xform as tx

import thunder  # isort: skip


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def region(self, x):
        h = self.layers[1](x)
        h[:, :2].pow_(2)
        return F.mish(h, inplace=True)

    def forward(self, x):
        h = F.silu(self.layers[0](x), inplace=True)
        return self.layers[2](checkpoint(self.region, h, use_reentrant=False)).mul_(2).sin_()


def errors(lora):
    torch.manual_seed(0)
    plain = Model()
    options = {"fsdp": {"zero": 3}} | ({"lora": {"r": 2, "target_modules": ["layers.1"]}} if lora else {})
    names = ["fsdp", "lora"] if lora else ["fsdp"]
    model = thunder.jit(copy.deepcopy(plain), transforms=tx.registry.resolve(names, options=options))
    x = torch.randn(4, 6)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = model(ours), plain(theirs)
    out.square().mean().backward()
    expected.square().mean().backward()
    whole = tx.handle(model).whole
    held = {name: whole(name, p.grad) for name, p in model.named_parameters() if p.grad is not None and name in NAMES}
    found = {name: (held[name] - plain.get_parameter(name).grad).abs().max().item() for name in held}
    backward = [b.sym.name for b in thunder.last_backward_traces(model)[-1].bound_symbols]
    return (out - expected).abs().max().item(), (ours.grad - theirs.grad).abs().max().item(), found, backward


NAMES = frozenset(name for name, _ in Model().named_parameters())


def test_in_place_under_zero_3(ranks):
    out, gradient, found, backward = ranks.run(errors, False)[0]
    assert found.keys() == NAMES
    assert max(out, gradient, *found.values()) < 1e-6
    assert backward.count("xform_gather_start") > 0


def test_in_place_under_zero_3_and_adapters(ranks):
    """Adapters are zero at first, so that the input's gradient is that of the plain model."""
    out, gradient, _, _ = ranks.run(errors, True)[0]
    assert max(out, gradient) < 1e-6
