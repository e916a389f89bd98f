"""Gradients of sharded models against eager PyTorch in one process over the data of all ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import thunder_xform as tx
from thunder_xform.testing.accumulation import STYLES, accumulate_eager, gradient_errors, one_context

TOLERANCE = 1e-6


# The models call functions on the parameters of their modules: Thunder takes seconds to look through modules' calls.


class Block(torch.nn.Module):
    """Sizes that no number of ranks divides, a bias shorter than four ranks, a scalar, a parameter of its own."""

    def __init__(self, width=7):
        super().__init__()
        self.up = torch.nn.Linear(width, 3)
        self.down = torch.nn.Linear(3, width)
        self.gain = torch.nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        return x + self.gain * linear(self.down, torch.tanh(linear(self.up, x)))


class Net(torch.nn.Module):
    """Blocks between tied ends; a root parameter; layers frozen, half frozen, never used; an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 7)
        self.scale = torch.nn.Parameter(torch.randn(7))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.frozen = torch.nn.Linear(7, 7).requires_grad_(False)
        self.mixed = torch.nn.Linear(7, 7)
        self.mixed.weight.requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)
        self.empty = torch.nn.Parameter(torch.empty(0, 4, 7))
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(7))

    def forward(self, tokens):
        x = torch.nn.functional.embedding(tokens, self.embedding.weight) * self.scale + self.shift
        x = self.blocks[1].forward(self.blocks[0].forward(torch.cat([self.empty, x])))
        x = linear(self.mixed, torch.relu(linear(self.frozen, x)))
        return torch.nn.functional.linear(x, self.head.weight)


class Branches(torch.nn.Module):
    """Different calls reach different parameters."""

    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Linear(4, 4)
        self.left = torch.nn.Linear(4, 5)
        self.right = torch.nn.Linear(4, 5)

    def forward(self, x, left):
        return linear(self.left if left else self.right, linear(self.shared, x))


def linear(module, x):
    return torch.nn.functional.linear(x, module.weight, module.bias)


def jit(model, names=("fsdp",), options=None, **fsdp):
    import thunder

    pipeline = tx.registry.resolve(list(names), options={"fsdp": fsdp} | (options or {}))
    return thunder.jit(model, transforms=pipeline)


def made(cls, seed):
    torch.manual_seed(seed)
    return cls()


def pair(cls=Net, **options):
    """A model of this rank's own initialization, sharded, and rank 0's in eager mode."""
    return jit(made(cls, 100 + dist.get_rank()), **options), made(cls, 100)


def loss_of(model, batch):
    inputs = batch if isinstance(batch, tuple) else (batch,)
    return model(*inputs).float().square().mean()


def token_batches(count):
    """``batches[microbatch][rank]``, the same on all ranks."""
    torch.manual_seed(7)
    return [[torch.randint(0, 11, (3, 4)) for _ in range(dist.get_world_size())] for _ in range(count)]


def float_batches(count):
    torch.manual_seed(8)
    return [[torch.randn(3, 4) for _ in range(dist.get_world_size())] for _ in range(count)]


def mine(batches):
    return [per_rank[dist.get_rank()] for per_rank in batches]


def worst(model, plain, group=None):
    return max(gradient_errors(model, plain, group).values())


def small(results, tolerance=TOLERANCE):
    """Every named error of every rank is within the tolerance."""
    for rank, errors in enumerate(results):
        assert errors, "no case ran"
        assert {case: e for case, e in errors.items() if not e <= tolerance} == {}, f"rank {rank}"


# -- accumulation ----------------------------------------------------------------------------------------------------

UNITS = [(zero, units) for zero in (2, 3) for units in ("block", "layer", "none")]
UNITS += [(3, ("Block",)), (3, ("blocks.0", "mixed"))]


def accumulate(zero, units):
    model, plain = pair(zero=zero, units=units)
    errors = {}
    for count in (1, 3, 4):
        batches = token_batches(count)
        accumulate_eager(plain, loss_of, batches)
        for name, style in STYLES.items():
            model.zero_grad()
            style(model, loss_of, mine(batches))
            errors[f"{name}, {count}"] = worst(model, plain)
    assert len(tx.handle(model).events) == 2, "one compilation with and one without synchronization"
    return errors


@pytest.mark.parametrize(("zero", "units"), UNITS, ids=str)
def test_accumulation_equals_eager(ranks, zero, units):
    """U01, U02: every way to use no_sync, including once per microbatch as Fabric and Accelerate do."""
    small(ranks.run(accumulate, zero, units))


def test_accumulation_on_four_ranks(four_ranks):
    """More ranks than rows: empty shards."""
    small(four_ranks.run(accumulate, 3, "block"))


def accumulate_alone():
    from torch.distributed import new_subgroups

    own, _ = new_subgroups(1)
    errors = {}
    model, plain = jit(made(Net, 100), process_group=own), made(Net, 100)
    batches = [[batch] for batch in mine(token_batches(3))]
    accumulate_eager(plain, loss_of, batches)
    for name, style in STYLES.items():
        model.zero_grad()
        style(model, loss_of, [batch for (batch,) in batches])
        errors[name] = worst(model, plain, own)
    return errors


def test_accumulation_on_one_rank(ranks):
    small(ranks.run(accumulate_alone))


def accumulate_reducing_each():
    model, plain = pair(reduce_each_microbatch=True)
    batches = token_batches(3)
    accumulate_eager(plain, loss_of, batches)
    errors = {}
    for name, style in STYLES.items():
        model.zero_grad()
        style(model, loss_of, mine(batches))
        errors[name] = worst(model, plain)
    assert len(tx.handle(model).events) == 1
    return errors


def test_reducing_each_microbatch(ranks):
    small(ranks.run(accumulate_reducing_each))


def two_models():
    """The switch of one model is not the other's."""
    (a, plain_a), (b, plain_b) = pair(), pair(Branches)
    tokens, floats = token_batches(2), [[(x, True) for x in per_rank] for per_rank in float_batches(1)]
    accumulate_eager(plain_a, loss_of, tokens)
    accumulate_eager(plain_b, loss_of, floats)
    with a.no_sync():
        loss_of(a, mine(tokens)[0]).backward()
        loss_of(b, mine(floats)[0]).backward()
    assert all(p.grad is None for p in a.parameters())
    errors = {"b, reduced while a was not": worst(b, plain_b)}
    loss_of(a, mine(tokens)[1]).backward()
    return errors | {"a": worst(a, plain_a)}


def test_no_sync_belongs_to_one_model(ranks):
    small(ranks.run(two_models))


def other_branches(units):
    """The reducing call does not reach all that the others accumulated."""
    model, plain = pair(Branches, units=units)
    errors = {}
    for lefts in ((True, True, False), (True, False, False), (False, True, False)):
        batches = [[(x, left) for x in per_rank] for per_rank, left in zip(float_batches(3), lefts, strict=True)]
        accumulate_eager(plain, loss_of, batches)
        model.zero_grad()
        one_context(model, loss_of, mine(batches))
        errors[str(lefts)] = worst(model, plain)
    return errors


@pytest.mark.parametrize("units", ["block", "layer"])
def test_parameters_of_other_branches_are_reduced_too(ranks, units):
    """In one bucket with those that are reached ("block": all are in the root's), and in buckets of their own."""
    small(ranks.run(other_branches, units))


# -- ways to run a backward ------------------------------------------------------------------------------------------


def backward_of_sum(model, a, b):
    (loss_of(model, a) + loss_of(model, b)).backward()


def interleaved(model, a, b):
    first, second = loss_of(model, a), loss_of(model, b)
    first.backward()
    second.backward()


def reversed_order(model, a, b):
    first, second = loss_of(model, a), loss_of(model, b)
    second.backward()
    first.backward()


def retained(model, a, b):
    loss = loss_of(model, a)
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(model, b).backward()


def penalized(model, a, b):
    """Parameters get gradients from outside of the compiled model, too."""
    for x in (a, b):
        penalty = sum((p * p.detach()).sum() for p in model.parameters() if p.requires_grad)
        if isinstance(penalty, DTensor):
            penalty = penalty.full_tensor()
        (loss_of(model, x) + 0.1 * penalty).backward()


RESTRICTED = ["blocks.1.up.weight", "scale"]


def restricted(model, a, b):
    """backward(inputs=...) leaves the gradients of all other parameters alone."""
    loss_of(model, a).backward()
    loss_of(model, b).backward(inputs=[model.get_parameter(name) for name in RESTRICTED])


def functional(model, a, b):
    """torch.autograd.grad leaves .grad alone, and returns nothing of it."""
    loss_of(model, a).backward()
    wanted = [model.get_parameter(name) for name in RESTRICTED]
    for parameter, gradient in zip(wanted, torch.autograd.grad(loss_of(model, b), wanted), strict=True):
        parameter.grad.add_(gradient, alpha=2)


def evaluated_between(model, a, b):
    """A second compiled entry, for evaluation, has the same buckets."""
    for x in (a, b):
        model.eval()
        loss_of(model, x).backward()
        with torch.no_grad():
            loss_of(model, x)
        model.train()
        loss_of(model, x).backward()


def zeroed_in_place(model, a, b):
    """zero_grad may leave zeros."""
    loss_of(model, a).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    loss_of(model, b).backward()


BACKWARDS = [
    backward_of_sum,
    interleaved,
    reversed_order,
    retained,
    penalized,
    restricted,
    functional,
    evaluated_between,
    zeroed_in_place,
]


def nosync(model):
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def stash_and_functional(model, a, b):
    """torch.autograd.grad in between neither takes nor loses what was accumulated."""
    with nosync(model):
        loss_of(model, a).backward()
    wanted = [model.get_parameter(name) for name in RESTRICTED]
    gradients = torch.autograd.grad(loss_of(model, b), wanted)
    loss_of(model, b).backward()
    for parameter, gradient in zip(wanted, gradients, strict=True):
        parameter.grad.add_(gradient, alpha=2)


def stash_and_restricted(model, a, b):
    """What was accumulated for the others is due with the reduction; their gradients of this backward are not."""
    with nosync(model):
        loss_of(model, a).backward()
    loss_of(model, b).backward(inputs=[model.get_parameter(name) for name in RESTRICTED])


def stash_restricted(model, a, b):
    """backward(inputs=...) accumulates for its inputs only."""
    with nosync(model):
        loss_of(model, a).backward(inputs=[model.get_parameter(name) for name in RESTRICTED])
    loss_of(model, b).backward()


def forward_inside(model, a, b):
    """What counts is where the forward ran."""
    with nosync(model):
        first = loss_of(model, a)
    first.backward()
    second = loss_of(model, b)
    with nosync(model):
        second.backward()


def stash_retained(model, a, b):
    with nosync(model):
        loss = loss_of(model, a)
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(model, b).backward()


def stash_interleaved(model, a, b):
    with nosync(model):
        first = loss_of(model, a)
    second = loss_of(model, b)
    first.backward()
    second.backward()


def stash_summed(model, a, b):
    """One backward through a call inside and one outside."""
    with nosync(model):
        first = loss_of(model, a)
    (first + loss_of(model, b)).backward()


def stash_summed_reversed(model, a, b):
    first = loss_of(model, a)
    with nosync(model):
        second = loss_of(model, b)
    (first + second).backward()


BACKWARDS += [
    stash_summed,
    stash_summed_reversed,
    stash_and_functional,
    stash_and_restricted,
    stash_restricted,
    forward_inside,
    stash_retained,
    stash_interleaved,
]


def backwards(zero):
    """Every rank runs the same steps on its own data; eager runs them once for each rank and takes the mean."""
    model, plain = pair(zero=zero)
    a, b = token_batches(2)
    errors = {}
    for way in BACKWARDS:
        total = {}
        for rank in range(dist.get_world_size()):
            plain.zero_grad()
            way(plain, a[rank], b[rank])
            for name, parameter in plain.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad.clone() / dist.get_world_size()
        for name, parameter in plain.named_parameters():
            parameter.grad = total.get(name)
        model.zero_grad()
        way(model, a[dist.get_rank()], b[dist.get_rank()])
        errors[way.__name__] = worst(model, plain)
    return errors


@pytest.mark.parametrize("zero", [2, 3])
def test_every_way_to_run_a_backward(ranks, zero):
    small(ranks.run(backwards, zero))


def abandoned():
    """What to expect of a loop that gives up on a step in the middle."""
    model, plain = pair()
    batches = token_batches(2)
    errors = {}
    for name, resets in (("model", True), ("optimizer", False)):
        accumulate_eager(plain, loss_of, batches[1:] if resets else batches)
        with model.no_sync():
            loss_of(model, mine(batches)[0]).backward()
        (model if resets else torch.optim.SGD(model.parameters())).zero_grad()
        loss_of(model, mine(batches)[1]).backward()
        errors[name] = worst(model, plain)
        model.zero_grad()
    return errors


def test_abandoned_accumulation(ranks):
    """The model's zero_grad forgets what was accumulated, an optimizer's cannot, as with FSDP2."""
    small(ranks.run(abandoned))


def failed_backward():
    """A backward that fails after its reductions started harms none of the later ones."""
    model, plain = pair()
    batches = token_batches(1)
    accumulate_eager(plain, loss_of, batches)

    def fail(gradient):
        raise ZeroDivisionError

    hook = model.get_parameter("scale").register_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        loss_of(model, mine(batches)[0]).backward()
    hook.remove()
    model.zero_grad()
    loss_of(model, mine(batches)[0]).backward()
    return {"after a failure": worst(model, plain)}


def test_a_failed_backward_leaves_no_trace(ranks):
    small(ranks.run(failed_backward))


# -- parameters ------------------------------------------------------------------------------------------------------


def moved():
    """A shard that its owner moved elsewhere is still the one that counts."""
    model, plain = pair()
    batches = token_batches(1)
    values = torch.randn(7, generator=torch.Generator().manual_seed(3))
    plain.scale.data.copy_(values)
    parameter = model.get_parameter("scale")
    parameter.data = values.chunk(dist.get_world_size())[dist.get_rank()].clone()
    accumulate_eager(plain, loss_of, batches)
    loss_of(model, mine(batches)[0]).backward()
    errors = {"gradient": worst(model, plain)}
    with torch.no_grad():
        plain.scale += 1
        parameter += 1
    errors["output"] = (model(batches[0][0]) - plain(batches[0][0])).abs().max().item()
    errors["state"] = (tx.handle(model).state_dict()["scale"] - plain.scale).abs().max().item()
    return errors


def test_a_parameter_whose_data_moved(ranks):
    small(ranks.run(moved))


def updated_between():
    """Updating one parameter is no update of those in the same bucket."""
    model, plain = pair(Branches)
    batches = [[(x, True) for x in per_rank] for per_rank in float_batches(1)]
    accumulate_eager(plain, loss_of, batches)
    loss = loss_of(model, mine(batches)[0])
    with torch.no_grad():
        model.get_parameter("right.weight").add_(1)
    loss.backward()
    return {"gradient": worst(model, plain)}


def test_parameters_of_one_bucket_are_updated_independently(ranks):
    small(ranks.run(updated_between))


def misused(zero):
    model, _ = pair(zero=zero)
    (x,) = mine(token_batches(1))
    loss = loss_of(model, x)
    with torch.no_grad():
        model.get_parameter("scale").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with model.no_sync():
        loss = loss_of(model, x)
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(loss, [model.get_parameter("scale")])


@pytest.mark.parametrize("zero", [2, 3])
def test_what_cannot_work_is_an_error(ranks, zero):
    """A parameter that changes before its backward; gradients of parameters, which are shards, without a reduction."""
    ranks.run(misused, zero)


def autocast():
    model, plain = pair(Branches)
    batches = [[(x, True) for x in per_rank] for per_rank in float_batches(2)]

    def loss_in_bfloat16(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(*batch)
        assert out.dtype == torch.bfloat16
        return out.float().square().mean()

    accumulate_eager(plain, loss_in_bfloat16, batches)
    one_context(model, loss_in_bfloat16, mine(batches))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    return {"relative": worst(model, plain) / largest}


def test_computing_in_bfloat16(ranks):
    """autocast on float32 parameters: within 2 percent of the largest gradient, bfloat16 having three digits."""
    small(ranks.run(autocast), 0.02)


def frozen_later():
    """Which parameters train is read anew when it changes."""
    model, plain = pair()
    batches = token_batches(1)
    errors = {}
    for trained in (True, False, True):
        for m in (model, plain):
            m.get_parameter("scale").requires_grad_(trained)
            m.zero_grad()
        accumulate_eager(plain, loss_of, batches)
        loss_of(model, mine(batches)[0]).backward()
        errors[f"trained: {trained}, {len(errors)}"] = worst(model, plain)
    assert len(tx.handle(model).events) == 2
    return errors


def test_freezing_a_parameter_later(ranks):
    small(ranks.run(frozen_later))


def without_gradients():
    batches = token_batches(1)
    (x,) = mine(batches)
    errors = {}
    model, plain = pair()
    with torch.no_grad():
        errors["autograd disabled"] = (model(x) - plain(x)).abs().max().item()
        assert not model(x).requires_grad
    accumulate_eager(plain, loss_of, batches)
    loss_of(model, x).backward()
    errors["then enabled"] = worst(model, plain)
    for zero in (2, 3):
        out = jit(made(Net, 100).requires_grad_(False), zero=zero)(x)
        assert not out.requires_grad
        errors[f"zero {zero}, all frozen"] = (out - plain(x)).abs().max().item()
    return errors


def test_forward_without_gradients(ranks):
    """U09: no trainable parameter, or autograd disabled."""
    small(ranks.run(without_gradients))


class Dtypes(torch.nn.Module):
    """One unit with parameters of several dtypes, and buffers of others."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.gains = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(5, 4).to(dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float64)
        )
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("steps", torch.randint(0, 100, ()))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        x = self.linear(x)
        for gain in self.gains:
            x = x * gain.float().sum(0)
        return torch.where(self.mask, x, x * 2)


def dtypes():
    """Exact up to the rounding of gradients in their own precision."""
    errors = {}
    for style in ("reduce_each", "one_context"):
        model, plain = pair(Dtypes)
        for name, buffer in plain.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), name
        batches = float_batches(2)
        accumulate_eager(plain, loss_of, batches)
        STYLES[style](model, loss_of, mine(batches))
        for name, error in gradient_errors(model, plain).items():
            expected = plain.get_parameter(name).grad
            # Four roundings: each microbatch on each rank, the sum over ranks, the sum over microbatches.
            rounding = 4 * torch.finfo(expected.dtype).eps * expected.abs().max().item()
            errors[f"{style}, {name}"] = error if rounding < TOLERANCE else max(0.0, error - rounding)
    return errors


def test_dtypes(ranks):
    """bfloat16 and float16 within 4 units in the last place of the largest gradient; the others exact."""
    small(ranks.run(dtypes))


def wire_dtypes():
    """Gathered in bfloat16, the model computes with rounded weights; reduced in float64, gradients are exact."""
    batches = float_batches(3)
    batches = [[(x, True) for x in per_rank] for per_rank in batches]
    model, plain = pair(Branches, gather_dtype="bfloat16", reduce_dtype="float64")
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16().float()
    accumulate_eager(plain, loss_of, batches)
    one_context(model, loss_of, mine(batches))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return {"rounded weights": worst(model, plain)}


def test_dtypes_on_the_wire(ranks):
    small(ranks.run(wire_dtypes))


def reduced_in_float32():
    """Many small bfloat16 gradients: summed in float32 none is lost, in bfloat16 they are."""

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self, x):
            return (self.weight * x).sum()

    found = {}
    for reduce_dtype in (None, "float32"):
        model = jit(Sum(), reduce_dtype=reduce_dtype)
        with model.no_sync():
            for k in range(100):
                model(torch.full((4,), 64.0 if k == 0 else 0.125, dtype=torch.bfloat16)).backward()
        tx.handle(model).sync_gradients()
        found[str(reduce_dtype)] = model.get_parameter("weight").grad[0].item()
    return found


def test_accumulation_in_reduce_dtype(ranks):
    exact = 64 + 99 * 0.125
    for found in ranks.run(reduced_in_float32):
        assert found["None"] == 64.0
        assert found["float32"] == torch.tensor(exact).bfloat16().item()


class Normalized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        with torch.no_grad():
            self.norm.running_mean.normal_()

    def forward(self, x):
        return self.norm(self.linear(x)).sigmoid()


def buffers():
    """Each rank updates its own running statistics from there on; the user's module keeps its own."""
    torch.manual_seed(100 + dist.get_rank())
    module = Normalized()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model, plain = jit(module), made(Normalized, 100)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    errors = {"at the start": (model.get_buffer("norm.running_mean") - plain.norm.running_mean).abs().max().item()}
    for step in range(3):
        errors[f"step {step}"] = (model(x) - plain(x)).abs().max().item()
    for name, buffer in plain.named_buffers():
        errors[name] = (model.get_buffer(name) - buffer).abs().max().item()
    model.eval()
    plain.eval()
    errors["eval"] = (model(x) - plain(x)).abs().max().item()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    return errors


def test_buffers_start_equal_and_are_updated(ranks):
    small(ranks.run(buffers))
