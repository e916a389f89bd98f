"""Gradients on two ranks against eager PyTorch in one process over the data of both."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import thunder_xform as tx

TOLERANCE = 1e-6


class Net(torch.nn.Module):
    """A tied pair, a parameter of the root, a layer that is frozen and one that is never used."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.up = torch.nn.Linear(4, 6)
        self.down = torch.nn.Linear(6, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.randn(4))
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.frozen(self.down(torch.relu(self.up(x)))) * self.scale
        return self.head(x)


class Branches(torch.nn.Module):
    """Different calls reach different parameters."""

    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Linear(4, 4)
        self.left = torch.nn.Linear(4, 4)
        self.right = torch.nn.Linear(4, 4)

    def forward(self, x, left=True):
        x = self.shared(x)
        return self.left(x) if left else self.right(x)


def jit(model, names=("ddp",), *, executors=None, **options):
    import thunder

    pipeline = tx.registry.resolve(list(names), options={"ddp": options})
    return thunder.jit(model, transforms=pipeline, **({"executors": executors} if executors else {}))


def made(cls, seed, *args):
    torch.manual_seed(seed)
    return cls(*args)


def pair(cls=Net, **options):
    """A model of this rank's own initialization, compiled, and rank 0's in eager mode."""
    return jit(made(cls, 100 + dist.get_rank()), **options), made(cls, 100)


def token_batches(count):
    """``batches[microbatch][rank]``, the same on all ranks."""
    torch.manual_seed(7)
    return [[torch.randint(0, 5, (3, 4)) for _ in range(dist.get_world_size())] for _ in range(count)]


def float_batches(count):
    torch.manual_seed(8)
    return [[torch.randn(3, 4) for _ in range(dist.get_world_size())] for _ in range(count)]


def loss_of(model, *inputs):
    return model(*inputs).float().square().mean()


def eager(plain, batches):
    """Leave in ``plain`` the gradients of the mean over ranks, summed over microbatches."""
    plain.zero_grad()
    for per_rank in batches:
        sum(loss_of(plain, *inputs if isinstance(inputs, tuple) else (inputs,)) for inputs in per_rank).div(
            len(per_rank)
        ).backward()


def error(model, plain):
    """Largest difference of any gradient; parameters without a gradient must be the same ones."""
    expected = dict(plain.named_parameters())
    worst = 0.0
    for name, parameter in tx.handle(model).parameters.items():
        if expected[name].grad is None:
            assert parameter.grad is None, f"{name} has a gradient"
        else:
            assert parameter.grad is not None, f"{name} has no gradient"
            worst = max(worst, (parameter.grad.float() - expected[name].grad).abs().max().item())
    return worst


def small(errors):
    """Assert on rank 0's side that every named error, of every rank, is within the tolerance."""
    for rank, found in enumerate(errors):
        assert found, "no case ran"
        assert {case: e for case, e in found.items() if not e <= TOLERANCE} == {}, f"rank {rank}"


# -- accumulation ----------------------------------------------------------------------------------------------------


def always_sync(model, inputs):
    for x in inputs:
        loss_of(model, x).backward()


def entered_once(model, inputs):
    with model.no_sync():
        for x in inputs[:-1]:
            loss_of(model, x).backward()
    loss_of(model, inputs[-1]).backward()


def entered_per_microbatch(model, inputs):
    for k, x in enumerate(inputs):
        with model.no_sync() if k < len(inputs) - 1 else contextlib.nullcontext():
            loss_of(model, x).backward()


def nested(model, inputs):
    with model.no_sync():
        for x in inputs[:-1]:
            with model.no_sync():
                pass
            loss_of(model, x).backward()
    loss_of(model, inputs[-1]).backward()


def ends_inside(model, inputs):
    with model.no_sync():
        for x in inputs:
            loss_of(model, x).backward()
    tx.handle(model).sync_gradients()


def leaves_by_exception(model, inputs):
    for x in inputs[:-1]:
        with contextlib.suppress(ZeroDivisionError), model.no_sync():
            loss_of(model, x).backward()
            raise ZeroDivisionError
    loss_of(model, inputs[-1]).backward()


def forward_outside(model, inputs):
    """As in torch, what counts is where the forward ran."""
    for x in inputs[:-1]:
        with model.no_sync():
            loss = loss_of(model, x)
        loss.backward()
    loss = loss_of(model, inputs[-1])
    with model.no_sync():
        loss.backward()


def one_backward(model, inputs):
    """Losses from inside and outside, summed: what came from inside waits for the next synchronization."""
    with model.no_sync():
        inside = [loss_of(model, x) for x in inputs[:-1]]
    sum(inside, loss_of(model, inputs[-1])).backward()
    tx.handle(model).sync_gradients()


def syncs_twice(model, inputs):
    """Averaging what is averaged already changes nothing."""
    always_sync(model, inputs)
    tx.handle(model).sync_gradients()


STYLES = [
    always_sync,
    entered_once,
    entered_per_microbatch,
    nested,
    ends_inside,
    leaves_by_exception,
    forward_outside,
    one_backward,
    syncs_twice,
]


def accumulate(options):
    model, plain = pair(**options)
    errors = {}
    for count in (1, 3, 4):
        batches = token_batches(count)
        eager(plain, batches)
        for style in STYLES:
            model.zero_grad()
            style(model, [per_rank[dist.get_rank()] for per_rank in batches])
            errors[f"{style.__name__}, {count}"] = error(model, plain)
    assert len(tx.handle(model).events) == 2, "one compilation with and one without synchronization"
    return errors


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 128 / 2**20}], ids=str)
def test_accumulation_equals_eager(ranks, options):
    """U02: every way to use no_sync, including once per microbatch as Fabric and Accelerate do."""
    small(ranks.run(accumulate, options))


def accumulate_over_zeros():
    """Gradients that zero_grad leaves in place as zeros take part like any others."""
    model, plain = pair()
    errors = {}
    for step in range(3):
        batches = token_batches(3)
        eager(plain, batches)
        model.zero_grad(set_to_none=False)
        entered_once(model, [per_rank[dist.get_rank()] for per_rank in batches])
        errors[f"step {step}"] = error(model, plain)
    return errors


def test_accumulation_over_zeroed_gradients(ranks):
    small(ranks.run(accumulate_over_zeros))


def branch():
    """The synchronizing call does not reach what the others accumulated."""
    model, plain = pair(Branches)
    x = float_batches(3)
    rank = dist.get_rank()
    errors = {}
    for _ in range(2):
        eager(plain, [[(d, k == 0) for d in per_rank] for k, per_rank in enumerate(x)])
        model.zero_grad()
        with model.no_sync():
            for k in range(2):
                loss_of(model, x[k][rank], k == 0).backward()
        loss_of(model, x[2][rank], False).backward()
        errors[f"step {len(errors)}"] = error(model, plain)
    return errors


def test_parameters_of_other_branches_are_reduced_too(ranks):
    small(ranks.run(branch))


def two_models():
    """The switch of one model is not the other's."""
    (a, plain_a), (b, plain_b) = pair(), pair(Branches)
    tokens, floats, rank = token_batches(2), float_batches(2), dist.get_rank()
    eager(plain_a, tokens)
    eager(plain_b, floats[:1])
    with a.no_sync():
        loss_of(a, tokens[0][rank]).backward()
        loss_of(b, floats[0][rank]).backward()
    errors = {"b, synchronized while a was not": error(b, plain_b)}
    loss_of(a, tokens[1][rank]).backward()
    return errors | {"a": error(a, plain_a)}


def test_no_sync_belongs_to_one_model(ranks):
    small(ranks.run(two_models))


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
        (loss_of(model, x) + sum(p.square().mean() for p in model.parameters() if p.requires_grad)).backward()


def restricted(model, a, b):
    """backward(inputs=...) leaves the gradients of all other parameters alone."""
    loss_of(model, a).backward()
    loss_of(model, b).backward(inputs=[model.get_parameter("up.weight"), model.get_parameter("scale")])


def functional(model, a, b):
    """torch.autograd.grad leaves .grad alone, and returns nothing of it."""
    loss_of(model, a).backward()
    wanted = [model.get_parameter("up.weight"), model.get_parameter("scale")]
    for parameter, gradient in zip(wanted, torch.autograd.grad(loss_of(model, b), wanted), strict=True):
        parameter.grad.add_(gradient, alpha=2)


def other_layout(model, a, b):
    """A gradient that the user put there, not contiguous."""
    model.get_parameter("up.weight").grad = torch.ones(4, 6).t()
    loss_of(model, a).backward()


def evaluated_between(model, a, b):
    """A second compiled entry, for evaluation, has buckets of the same parameters."""
    for x in (a, b):
        model.eval()
        loss_of(model, x).backward()
        with torch.no_grad():
            loss_of(model, x)
        model.train()
        loss_of(model, x).backward()


BACKWARDS = [
    backward_of_sum,
    interleaved,
    reversed_order,
    retained,
    penalized,
    restricted,
    functional,
    other_layout,
    evaluated_between,
]


def backwards():
    """Every rank runs the same steps on its own data; eager runs them once for each rank and takes the mean."""
    model, plain = pair()
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
        errors[way.__name__] = error(model, plain)
    return errors


def test_every_way_to_run_a_backward(ranks):
    small(ranks.run(backwards))


def failed_backward():
    """A backward that fails after its reductions started harms none of the later ones."""
    model, plain = pair()
    (batch,) = token_batches(1)
    eager(plain, [batch])

    def fail(gradient):
        raise ZeroDivisionError

    hook = model.get_parameter("up.weight").register_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        loss_of(model, batch[dist.get_rank()]).backward()
    hook.remove()
    model.zero_grad()
    loss_of(model, batch[dist.get_rank()]).backward()
    return {"after a failure": error(model, plain)}


def test_a_failed_backward_leaves_no_trace(ranks):
    small(ranks.run(failed_backward))


# -- parameters ------------------------------------------------------------------------------------------------------


class Detached(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(4, 4)
        self.cut = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x) + self.cut(x).detach()


def detached():
    model, plain = pair(Detached)
    (batch,) = float_batches(1)
    eager(plain, [batch])
    loss_of(model, batch[dist.get_rank()]).backward()
    return {"detached": error(model, plain)}


def test_detached_parameters_get_no_gradient(ranks):
    small(ranks.run(detached))


def frozen_later():
    """Which parameters train is read anew when it changes."""
    model, plain = pair()
    (batch,) = token_batches(1)
    errors = {}
    for trained in (True, False, True):
        for m in (model, plain):
            m.get_parameter("up.weight").requires_grad_(trained)
            m.zero_grad()
        eager(plain, [batch])
        loss_of(model, batch[dist.get_rank()]).backward()
        errors[f"trained: {trained}, {len(errors)}"] = error(model, plain)
    assert len(tx.handle(model).events) == 2
    return errors


def test_freezing_a_parameter_later(ranks):
    small(ranks.run(frozen_later))


def without_gradients():
    (batch,) = token_batches(1)
    x = batch[dist.get_rank()]
    model, plain = pair()
    with torch.no_grad():
        errors = {"autograd disabled": (model(x) - plain(x)).abs().max().item()}
        assert not model(x).requires_grad
    eager(plain, [batch])
    loss_of(model, x).backward()
    errors["then enabled"] = error(model, plain)
    model = jit(made(Net, 100).requires_grad_(False))
    out = model(x)
    assert not out.requires_grad
    return errors | {"all frozen": (out - plain(x)).abs().max().item()}


def test_forward_without_gradients(ranks):
    """U09: no trainable parameter, or autograd disabled."""
    small(ranks.run(without_gradients))


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.gains = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(4).to(dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float64)
        )
        self.empty = torch.nn.Parameter(torch.empty(0))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("steps", torch.randint(0, 100, ()))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        x = self.linear(x)
        for gain in self.gains:
            x = x * gain.float()
        return torch.where(self.mask, x, x * 2).square().mean() + self.empty.sum()


def dtypes(options):
    """Exact up to one rounding of the averaged gradient in its own precision."""
    model, plain = pair(Mixed, **options)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    (batch,) = float_batches(1)
    eager(plain, [batch])
    loss_of(model, batch[dist.get_rank()]).backward()
    errors = {}
    for name, parameter in tx.handle(model).parameters.items():
        expected = plain.get_parameter(name).grad
        assert parameter.grad.dtype == parameter.dtype
        if expected.numel():
            scale = torch.finfo(parameter.dtype).eps * 2 * expected.abs().max().item()
            difference = (parameter.grad.double() - expected.double()).abs().max().item()
            errors[name] = max(0.0, difference - scale) if scale > TOLERANCE else difference
    return errors


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}], ids=str)
def test_dtypes(ranks, options):
    small(ranks.run(dtypes, options))


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
