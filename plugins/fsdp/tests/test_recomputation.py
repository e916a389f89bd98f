"""V29, V41: whole weights, and what is computed from them alone, are not kept for the backward at zero=3."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import thunder_xform as tx
from thunder_xform.testing import pipeline_of
from thunder_xform_fsdp.options import Options
from thunder_xform_fsdp.plugin import FSDP

import thunder  # isort: skip


class Same(tx.Plugin):
    """Rewrites every operator into itself."""

    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        return computation.rewrite(lambda op: True, lambda op, edit: op.call())


class Precision(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        def cast(op, edit):
            args = [a if a is None else tx.ops.to(a, torch.bfloat16) for a in op.args]
            return tx.ops.to(op.call(*args), torch.float32)

        return computation.rewrite("linear", cast)


USES = {
    "linear": lambda s, h: F.linear(h, s.v),
    "transpose": lambda s, h: F.linear(h, s.w.t().contiguous()),
    "product": lambda s, h: h @ (s.w * s.g),
    "reshape": lambda s, h: h @ s.v.reshape(8, 32).t(),
    "weight norm": lambda s, h: h @ (s.w / s.w.norm(dim=0, keepdim=True) * s.g),
    "constant": lambda s, h: h @ (s.w * torch.ones(32, 8)),
    "returned": lambda s, h: (h @ (s.w * s.g), s.w * s.g),
    "parameter returned": lambda s, h: (h @ s.w, s.w),
    "checkpointed": lambda s, h: checkpoint(lambda t: t @ (s.w * s.g), h, use_reentrant=False),
}


class Model(nn.Module):
    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(16, 32)
        self.v = nn.Parameter(torch.randn(8, 32))
        self.w = nn.Parameter(torch.randn(32, 8))
        self.g = nn.Parameter(torch.randn(8))
        self.use = use

    def forward(self, x):
        return USES[self.use](self, torch.tanh(self.a(x)))


def backward(model, x, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((o.float() * torch.arange(o.numel()).reshape(o.shape)).mean() for o in outputs).backward()


def measure(cases):
    """For each case: whole weights saved, bytes saved beside arguments, gathers in the backward, gradients' error."""
    make = {"fsdp": lambda: FSDP(Options(zero=3)), "same": lambda: Same(None), "precision": lambda: Precision(None)}
    found = []
    for use, names, autocast in cases:
        model = Model(use)
        plain = copy.deepcopy(model)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
        compiled = thunder.jit(model, transforms=pipeline_of(**{name: make[name]() for name in names}))
        backward(compiled, x, autocast)
        backward(plain, x, autocast)
        whole = tx.handle(compiled).whole
        held = {n: whole(n, p.grad) for n, p in compiled.named_parameters() if p.grad is not None}
        wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        error = max(((held[n] - g).abs().max() / g.abs().max()).item() for n, g in wanted.items())
        forward = thunder.last_traces(compiled)[-1]
        given = {a.name for a in forward.args}
        kept = [p for p in forward.bound_symbols[-1].args[1][0] if p.name not in given]
        weights = [p.name for p in kept if tuple(p.shape) in ((32, 8), (8, 32), (32, 16))]
        calls = [b.sym.name for b in thunder.last_backward_traces(compiled)[-1].bound_symbols]
        gathers = calls.count("xform_gather_start")
        found.append((len(weights), sum(p.numel * p.dtype.bytes for p in kept), gathers, error))
    return found


@pytest.mark.parametrize("autocast", [False, True])
def test_whatever_is_computed_from_whole_weights_alone_is_computed_again(ranks, autocast):
    cases = [(use, ("fsdp",), autocast) for use in USES]
    for use, (weights, _, gathers, error) in zip(USES, ranks.run(measure, cases)[0], strict=True):
        assert (use, weights, gathers) == (use, 0, 1)
        assert error < (2e-2 if autocast else 1e-5), use


def test_a_rewrite_into_the_same_changes_neither_what_is_saved_nor_gathers(ranks):
    orders = [("fsdp",), ("fsdp", "same"), ("same", "fsdp"), ("same", "fsdp", "same")]
    cases = [(use, names, autocast) for use, autocast in (("linear", True), ("returned", False)) for names in orders]
    found = ranks.run(measure, cases)[0]
    for first in (0, len(orders)):
        plain, *others = [case[:3] for case in found[first : first + len(orders)]]
        assert others == [plain] * len(others)
    assert all(error < (2e-2 if case[2] else 1e-5) for case, (*_, error) in zip(cases, found, strict=True))


def test_casts_of_another_plugin_are_computed_again_before_and_after(ranks):
    orders = [("fsdp", "precision"), ("precision", "fsdp"), ("fsdp", "precision", "same")]
    for weights, _, gathers, error in ranks.run(measure, [("linear", names, False) for names in orders])[0]:
        assert (weights, gathers) == (0, 1)
        assert error < 2e-2
