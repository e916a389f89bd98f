"""How many collectives run, of how many bytes, in which order and when."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist

import thunder_xform as tx

MIB = 2**20


class Net(torch.nn.Module):
    """Defined in another order than used; a tied pair; parameters that take no part."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.scale = torch.nn.Parameter(torch.randn(4))
        self.down = torch.nn.Linear(6, 4)
        self.up = torch.nn.Linear(4, 6)
        self.embedding = torch.nn.Embedding(5, 4)
        self.embedding.weight = self.head.weight
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, tokens):
        x = self.up(self.embedding(tokens))
        return self.head(self.frozen(self.down(torch.relu(x))) * self.scale)


#: Bytes in the reverse order of first use, which is the order in which gradients are complete.
BYTES = {"scale": 16, "down.bias": 16, "down.weight": 96, "up.bias": 24, "up.weight": 96, "head.weight": 80}
ALL = sum(BYTES.values())


def jit(module, **options):
    import thunder

    return thunder.jit(module, transforms=tx.registry.resolve(["ddp"], options={"ddp": options}))


@contextlib.contextmanager
def reductions():
    """Bytes of each all-reduce that starts inside."""
    sizes, all_reduce = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = all_reduce


def count(cap_bytes):
    """Sizes per phase of a step with three microbatches, one of them synchronized."""
    model = jit(Net(), **({} if cap_bytes is None else {"bucket_cap_mb": cap_bytes / MIB}))
    tokens = torch.randint(0, 5, (3,))
    with reductions() as forward, model.no_sync():
        losses = [model(tokens).sum() for _ in range(2)]
    with reductions() as inside, model.no_sync():
        for loss in losses:
            loss.backward()
    with reductions() as outside:
        model(tokens).sum().backward()
    with reductions() as after, model.no_sync():
        model(tokens).sum().backward()
    with reductions() as finish:
        tx.handle(model).sync_gradients()
    with reductions() as evaluation, torch.no_grad():
        model(tokens)
    return {
        "nothing": forward + inside + after + evaluation,
        "outside": outside,
        "finish": sorted(finish),
    }


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (None, [ALL]),
        (0, list(BYTES.values())),
        (128, [128, 120, 80]),
        (ALL - 1, [ALL - 80, 80]),
    ],
)
def test_one_reduction_per_bucket_and_step(ranks, cap, expected):
    """U03: buckets exist, follow the order of use, and stay within their size unless one parameter exceeds it."""
    for found in ranks.run(count, cap):
        assert found["outside"] == expected
        assert found["nothing"] == []
        assert sum(found["finish"]) == ALL
        assert len(found["finish"]) <= len(BYTES)


def two_dtypes():
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).to(torch.bfloat16)])

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers[0](x) + self.layers[1](x.to(torch.bfloat16)).float()

    compiled = jit(Both())
    with reductions() as sizes:
        compiled(torch.randn(2, 4)).sum().backward()
    return sizes


def test_a_bucket_has_one_dtype(ranks):
    for sizes in ranks.run(two_dtypes):
        assert sizes == [40, 80]


def autograd_grad():
    model = jit(Net(), bucket_cap_mb=128 / MIB)
    tokens = torch.randint(0, 5, (3,))
    with reductions() as sizes:
        torch.autograd.grad(model(tokens).sum(), [model.get_parameter("scale")])
    return sizes


def test_a_functional_gradient_is_reduced_like_any_other(ranks):
    for sizes in ranks.run(autograd_grad):
        assert sizes == [128, 120, 80]


def frozen():
    model = jit(Net().requires_grad_(False))
    with reductions() as sizes:
        model(torch.randint(0, 5, (3,)))
    return sizes


def test_nothing_is_reduced_if_nothing_trains(ranks):
    for sizes in ranks.run(frozen):
        assert sizes == []


def schedule():
    """Names of the operators of the backward, in order."""
    import thunder

    model = jit(Net(), bucket_cap_mb=128 / MIB)
    model(torch.randint(0, 5, (3,))).sum().backward()
    trace = thunder.last_backward_traces(model)[-1]
    return [bsym.sym.name for bsym in trace.bound_symbols]


def test_reductions_overlap_with_the_backward(ranks):
    """All but the last start before the backward has computed everything; all are awaited behind that."""
    for names in ranks.run(schedule):
        starts = [i for i, name in enumerate(names) if name == "xform_all_reduce_start"]
        waits = [i for i, name in enumerate(names) if name == "xform_all_reduce_wait"]
        other = ("xform_", "python_del", "del", "python_return", "return", "clear_mutable", "unpack", "check")
        computations = [i for i, name in enumerate(names) if not name.startswith(other)]
        assert len(starts) == len(waits) == 3
        for start, following in itertools.pairwise(starts):
            assert sum(start < i < following for i in computations) > 1, names
        assert max(computations) < min(waits), names
