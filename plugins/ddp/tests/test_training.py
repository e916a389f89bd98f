"""Training on two ranks next to torch.nn.parallel.DistributedDataParallel, and what surrounds it."""

import contextlib
import copy
import os
import shutil

import pytest
import torch
import torch.distributed as dist

import thunder_xform as tx
from thunder_xform.errors import PipelineError

TOLERANCE = 1e-6


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        # No bias: the loss does not depend on that of the keys, and AdamW would turn rounding errors into steps.
        self.mix = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Transformer(torch.nn.Module):
    """Next-token prediction with a tied head; ``embedding.weight`` is used first and last."""

    def __init__(self, vocabulary=11, width=8, depth=1):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        logits = self.head(self.norm(self.blocks(self.embedding(tokens[:, :-1]))))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def jit(module, names=("ddp",), *, executors=None, **options):
    import thunder

    pipeline = tx.registry.resolve(list(names), options={"ddp": options})
    return thunder.jit(module, transforms=pipeline, **({"executors": executors} if executors else {}))


def losses(model, parameters, microbatches, clip):
    """Losses of 20 steps of AdamW on this rank's own data, and the norms found when clipping."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found, norms = [], []
    for _ in range(20):
        optimizer.zero_grad()
        for k in range(microbatches):
            last = k == microbatches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(torch.randint(0, 11, (4, 7), generator=generator)) / microbatches
                loss.backward()
            found.append(loss.item())
        norms.append(clip().item())
        optimizer.step()
    return found, norms


def side_by_side(microbatches, options):
    torch.manual_seed(0)
    module = Transformer()
    plain = copy.deepcopy(module)
    model = jit(module, **options)
    ours = losses(model, model.parameters(), microbatches, lambda: tx.handle(model).clip_grad_norm_(0.5))
    reference = torch.nn.parallel.DistributedDataParallel(plain)
    theirs = losses(
        reference,
        reference.parameters(),
        microbatches,
        lambda: torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5),
    )
    weights = dict(plain.named_parameters())
    state = max((p - weights[name]).abs().max().item() for name, p in tx.handle(model).parameters.items())
    return ours, theirs, state


@pytest.mark.parametrize(("microbatches", "options"), [(1, {}), (3, {"bucket_cap_mb": 0.001})])
def test_twenty_steps_of_adamw_equal_torch_ddp(ranks, microbatches, options):
    """Accumulation with no_sync, clipping by clip_grad_norm_, a tied pair; the weights agree in the end as well."""
    results = ranks.run(side_by_side, microbatches, options)
    for (ours, our_norms), (theirs, their_norms), state in results:
        assert len(ours) == 20 * microbatches
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= TOLERANCE
        assert max(abs(a - b) for a, b in zip(our_norms, their_norms, strict=True)) <= TOLERANCE
        assert theirs[0] - theirs[-1] > 0.1 / microbatches, "nothing was learnt"
        assert state <= 1e-5
    assert results[0][0][0] != results[1][0][0], "both ranks had the same data"
    assert results[0][0][1] == results[1][0][1], "the norm is that of the averaged gradient"


def half():
    """Gradients in bfloat16 against the mean of those of eager bfloat16 models."""
    torch.manual_seed(0)
    module = Transformer().to(torch.bfloat16)
    plain = copy.deepcopy(module)
    model = jit(module)
    tokens = [torch.randint(0, 11, (4, 7)) for _ in range(2)]
    model(tokens[dist.get_rank()]).backward()
    sums = {}
    for batch in tokens:
        plain.zero_grad()
        plain(batch).backward()
        for name, parameter in plain.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad.double() / 2
    worst = 0.0
    for name, parameter in tx.handle(model).parameters.items():
        assert parameter.grad.dtype == torch.bfloat16
        worst = max(worst, ((parameter.grad.double() - sums[name]).norm() / sums[name].norm()).item())
    return worst


def test_bfloat16(ranks):
    """Relative to each gradient's norm; the eager model itself is exact to no more than a few roundings of 2**-8."""
    assert max(ranks.run(half)) <= 4 * 2**-8


# -- optimizers ------------------------------------------------------------------------------------------------------


def optimizer_of_the_plain_model(when):
    """U13."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    if when == "before":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = jit(module)
    if when == "after":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.randn(2, 4))
    if when == "after the first call":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = model(torch.randn(2, 4)).sum()
    try:
        loss.backward()
        optimizer.step()
    except PipelineError as error:
        return str(error)


@pytest.mark.parametrize("when", ["before", "after", "after the first call"])
def test_an_optimizer_of_the_plain_model_is_refused(ranks, when):
    expected = (
        "SGD holds parameters of the plain model ('0.weight', '0.bias', '1.weight' and 1 more), but the compiled model "
        "trains others in their place, and no optimizer holds any of those. "
        "Build the optimizer from what thunder.jit returned: SGD(model.parameters(), ...)."
    )
    assert ranks.run(optimizer_of_the_plain_model, when) == [expected, expected]


# -- fusing executors ------------------------------------------------------------------------------------------------


def fused():
    """Losses and gradients with torch.compile as an executor, and the collectives of the backward trace."""
    import thunder

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    plain = copy.deepcopy(module)
    model = jit(module, executors=["sdpa", "torchcompile"], bucket_cap_mb=0.0001)
    x = [torch.randn(3, 4) for _ in range(2)]
    model(x[dist.get_rank()]).square().mean().backward()
    sum(plain(inputs).square().mean() for inputs in x).div(2).backward()
    error = max((p.grad - plain.get_parameter(n).grad).abs().max().item() for n, p in model.named_parameters())
    trace = thunder.last_backward_traces(model)[-1]
    names = [bsym.sym.name for bsym in trace.bound_symbols]
    return error, names


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
def test_a_fusing_executor_leaves_collectives_alone(ranks):
    """U24."""
    for error, names in ranks.run(fused):
        assert error <= TOLERANCE
        assert names.count("xform_all_reduce_start") == names.count("xform_all_reduce_wait") == 4
        assert any("TorchCompile" in name for name in names), names
