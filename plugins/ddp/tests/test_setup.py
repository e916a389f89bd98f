"""What happens at thunder.jit: one start for all ranks, groups, and errors that reach every rank before any change."""

import copy

import pytest
import torch
import torch.distributed as dist

import thunder_xform as tx
from thunder_xform.errors import ParallelError


class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.outer = torch.nn.Linear(width, 4)

    def forward(self, x):
        return self.outer(self.norm(self.inner(x)))


def jit(module, pipeline=None, **options):
    import thunder

    return thunder.jit(module, transforms=pipeline or tx.registry.resolve(["ddp"], options={"ddp": options}))


def seeded(seed, *args):
    torch.manual_seed(seed)
    module = Net(*args)
    for buffer in (module.norm.running_mean, module.norm.running_var):
        buffer.uniform_()
    module.norm.num_batches_tracked += seed
    return module


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def live(model):
    return {name: t.detach() for named in (model.named_parameters(), model.named_buffers()) for name, t in named}


# -- one start -------------------------------------------------------------------------------------------------------


def started_from(source):
    """Whose values this rank starts from, and whether its own module kept its own."""
    module = seeded(100 + dist.get_rank())
    before = state(module)
    now = live(jit(module, broadcast_from=source))
    origins = [rank for rank in range(dist.get_world_size()) if equal(now, state(seeded(100 + rank)))]
    return origins, equal(state(module), before)


@pytest.mark.parametrize(("source", "expected"), [(0, ([0], [0])), (1, ([1], [1])), (None, ([0], [1]))])
def test_all_ranks_start_from_one(ranks, source, expected):
    found = ranks.run(started_from, source)
    assert [origins for origins, _ in found] == list(expected)
    assert all(untouched for _, untouched in found)


def storages():
    """What shares storage with the user's module, and what has become of it."""
    module = seeded(100)
    model = jit(module)
    own = {t.data_ptr() for t in live(model).values()}
    shared = sorted(name for name, value in module.state_dict().items() if value.data_ptr() in own)

    frozen = seeded(100).requires_grad_(False)
    trusting = jit(frozen, broadcast_from=None)
    frozen_shared = all(trusting.get_parameter(n).data_ptr() == p.data_ptr() for n, p in frozen.named_parameters())

    released = seeded(100 + dist.get_rank())
    model = jit(released, release_originals=True)
    devices = {t.device.type for t in released.state_dict().values()}
    x = torch.randn(8, 4)
    out = model(x)
    out.sum().backward()
    error = (out - seeded(100)(x)).abs().max().item()
    return shared, frozen_shared, devices, error


def test_storage(ranks):
    """Nothing that is written to is shared; what nothing writes to is not copied; released means no memory."""
    for shared, frozen_shared, devices, error in ranks.run(storages):
        assert shared == []
        assert frozen_shared
        assert devices == {"meta"}
        assert error <= 1e-6


# -- groups ----------------------------------------------------------------------------------------------------------


def gradient_under(option):
    """The gradient of this rank's own number, averaged over the group that `option` makes."""
    module = torch.nn.Linear(1, 1, bias=False)
    model = jit(module, process_group=option)
    model(torch.full((1, 1), float(dist.get_rank() + 1))).sum().backward()
    return model.get_parameter("weight").grad.item()


def groups():
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    both = dist.new_group([0, 1])
    tall = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    wide = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    line = dist.init_device_mesh("cpu", (2,))
    options = {
        "none": None,
        "alone": alone,
        "both": both,
        "(2, 1) replicate": tall["replicate"],
        "(2, 1) shard": tall["shard"],
        "(1, 2) replicate": wide["replicate"],
        "one dimension": line,
    }
    return {name: gradient_under(option) for name, option in options.items()}


def test_groups_and_mesh_dimensions(ranks):
    for rank, found in enumerate(ranks.run(groups)):
        own = float(rank + 1)
        assert found == {
            "none": 1.5,
            "alone": own,
            "both": 1.5,
            "(2, 1) replicate": 1.5,
            "(2, 1) shard": own,
            "(1, 2) replicate": own,
            "one dimension": 1.5,
        }


def refused(module, pipeline=None, **options):
    """The error, and whether the module is bitwise what it was."""
    before = {name: (value.device, id(value)) for name, value in module.state_dict(keep_vars=True).items()}
    values = {name: value for name, value in state(module).items() if not value.is_meta}
    try:
        jit(module, pipeline, **options)
        problem = None
    except tx.errors.XformError as error:
        problem = f"{type(error).__name__}: {error}"
    after = {name: (value.device, id(value)) for name, value in module.state_dict(keep_vars=True).items()}
    now = {name: value for name, value in module.state_dict().items() if not value.is_meta}
    return problem, before == after and equal(values, now)


def bad_groups():
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    only_first = dist.new_group([0])
    found = {
        "a mesh of two dimensions": refused(Net(), process_group=mesh),
        "a number": refused(Net(), process_group=3),
    }
    if dist.get_rank() == 1:
        found["not a member"] = refused(Net(), process_group=only_first)
    return found


def test_unusable_groups(ranks):
    first, second = ranks.run(bad_groups)
    for found in (first, second):
        assert found["a mesh of two dimensions"] == (
            (
                "ParallelError: Plugin 'ddp' got a mesh with the dimensions ('replicate', 'shard') and sizes (2, 1). "
                'Pass one dimension of it, for example process_group=mesh["shard"].'
            ),
            True,
        )
        assert found["a number"] == (
            (
                "ParallelError: Plugin 'ddp' got int as process_group. "
                "Pass a torch.distributed.ProcessGroup or one dimension of a DeviceMesh."
            ),
            True,
        )
    assert second["not a member"][0].startswith("ParallelError: Rank 1 is not a member of the process group")


def test_no_process_group():
    assert not dist.is_initialized()
    problem, unchanged = refused(Net())
    assert problem == (
        "ParallelError: Plugin 'ddp' needs a process group, but torch.distributed is not initialized. "
        "Start with torchrun and call torch.distributed.init_process_group() before thunder.jit."
    )
    assert unchanged


# -- errors on one rank or on all ------------------------------------------------------------------------------------


def unusable():
    rank = dist.get_rank()

    def one_on_meta(where):
        module = Net()
        if rank in where:
            module.outer.to("meta")
        return module

    return {
        "source": refused(Net(), broadcast_from=2),
        "negative source": refused(Net(), broadcast_from=-1),
        "meta on all": refused(one_on_meta({0, 1})),
        "meta on the second": refused(one_on_meta({1})),
    }


def test_unusable_models(ranks):
    """Mixed devices and sources that do not exist: every rank gets to know, also if only one found out."""
    found = ranks.run(unusable)
    for rank, results in enumerate(found):
        assert all(unchanged for _, unchanged in results.values())
        assert results["source"][0] == (
            "ParallelError: Plugin 'ddp' shall broadcast from rank 2, but its process group has 2 ranks. "
            "Set broadcast_from to a rank between 0 and 1."
        )
        assert "Give int >= 0 or None." in results["negative source"][0]
        meta = "Plugin 'ddp' cannot replicate 'outer.weight', which has no data (device meta)."
        assert meta in results["meta on all"][0]
        assert meta in results["meta on the second"][0]
        assert ("failed on another rank (rank 1" in results["meta on the second"][0]) == (rank == 0)


def test_negative_bucket_size():
    with pytest.raises(tx.errors.OptionError, match=r"'bucket_cap_mb' of 'ddp' .* is -1, .*Give float >= 0\."):
        tx.registry.resolve([("ddp", {"bucket_cap_mb": -1})])


def disagreement():
    from thunder_xform.testing import pipeline_of
    from thunder_xform_ddp.options import Options
    from thunder_xform_ddp.plugin import DDP

    rank = dist.get_rank()
    shape = Net(4 + rank)
    extra = Net()
    if rank == 1:
        extra.outer.bias = None
    frozen = Net()
    frozen.inner.weight.requires_grad_(rank == 0)
    tied = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    if rank == 1:
        tied[1].weight = tied[0].weight
    return {
        "options": refused(Net(), bucket_cap_mb=1.0 + rank),
        "names": refused(Net(), pipeline_of(ddp=DDP(Options()), **({"other": tx.Plugin(None)} if rank == 1 else {}))),
        "shape": refused(shape),
        "parameter": refused(extra),
        "frozen": refused(frozen),
        "tied": refused(tied),
    }


def test_ranks_that_disagree(ranks):
    """One error on all ranks, which shows the difference; nothing is changed and nobody waits."""
    first, second = ranks.run(disagreement)
    assert first == second
    assert all(unchanged for _, unchanged in first.values())
    problems = {case: problem for case, (problem, _) in first.items()}
    assert problems["options"] == (
        "ParallelError: Ranks 0 and 1 resolved different pipelines:\n  ddp: option bucket_cap_mb 1.0 -> 2.0\n "
        "Resolve the same names, options and versions on every rank."
    )
    assert "\n  other: added\n" in problems["names"]
    assert problems["shape"] == (
        "ParallelError: Ranks 0 and 1 built different models:\n"
        "  inner.bias: parameter (4,) torch.float32, trained -> parameter (5,) torch.float32, trained\n"
        "  inner.weight: parameter (4, 4) torch.float32, trained -> parameter (5, 4) torch.float32, trained\n"
        "  norm.bias: parameter (4,) torch.float32, trained -> parameter (5,) torch.float32, trained\n"
        "  norm.running_mean: buffer (4,) torch.float32 -> buffer (5,) torch.float32\n"
        "  norm.running_var: buffer (4,) torch.float32 -> buffer (5,) torch.float32\n"
        "  norm.weight: parameter (4,) torch.float32, trained -> parameter (5,) torch.float32, trained\n"
        "  outer.weight: parameter (4, 4) torch.float32, trained -> parameter (4, 5) torch.float32, trained\n "
        "Build the same model on every rank; only the values may differ."
    )
    assert "\n  outer.bias: parameter (4,) torch.float32, trained -> absent\n" in problems["parameter"]
    assert "\n  inner.weight: parameter (4, 4) torch.float32, trained -> parameter" in problems["frozen"]
    assert ", also 1.weight\n" in problems["tied"]


class Failing(tx.Plugin):
    """Fails to transform the model on one rank, as by a lack of memory."""

    def process_groups(self):
        return (dist.group.WORLD,)

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory")


def failing():
    import thunder

    from thunder_xform.testing import pipeline_of

    module = Net()
    before = state(module)
    try:
        thunder.jit(module, transforms=pipeline_of(failing=Failing(None)))
    except Exception as error:
        return type(error), str(error), equal(state(module), before)


def test_a_hook_that_fails_on_one_rank_stops_all(ranks):
    first, second = ranks.run(failing)
    assert first == (
        ParallelError,
        (
            "update_model_state of plugin 'failing' failed on another rank (rank 1: RuntimeError: out of memory). "
            "Fix it there; this rank stopped with it."
        ),
        True,
    )
    assert second == (RuntimeError, "out of memory", True)


# -- resolution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [["ddp", "ddp"], "ddp + ddp", ["ddp", ("ddp", {"bucket_cap_mb": 1.0})]])
def test_twice_in_a_request(request_):
    """U18: not wrong output, but an error."""
    with pytest.raises(tx.errors.DuplicateRequestError, match="'ddp'"):
        tx.registry.resolve(request_)


def test_misspelt_option():
    """U23."""
    with pytest.raises(tx.errors.UnknownOptionError, match=r"'bucket_cap'\. Did you mean 'bucket_cap_mb'\?"):
        tx.registry.resolve([("ddp", {"bucket_cap": 1.0})])


def world_of_one():
    torch.manual_seed(0)
    module = Net()
    plain = copy.deepcopy(module)
    model = jit(module)
    x = torch.randn(8, 4)
    with model.no_sync():
        model(x).square().mean().backward()
    model(x).square().mean().backward()
    for _ in range(2):
        plain(x).square().mean().backward()
    return max((p.grad - plain.get_parameter(n).grad).abs().max().item() for n, p in model.named_parameters())


def test_a_world_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert world_of_one() <= 1e-6
    finally:
        dist.destroy_process_group()
