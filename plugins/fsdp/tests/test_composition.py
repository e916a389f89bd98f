"""Sharding together with replication, adapters, executors and optimizers."""

import contextlib
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

import thunder_xform as tx
from thunder_xform.testing.accumulation import (
    STYLES,
    accumulate_eager,
    ends_inside,
    gradient_errors,
    one_context,
    own_rows,
    reduce_each,
)

TOLERANCE = 1e-6

needs_ddp = pytest.mark.skipif(find_spec("thunder_xform_ddp") is None, reason="needs the plugin ddp")
needs_lora = pytest.mark.skipif(find_spec("thunder_xform_lora") is None, reason="needs the plugin lora")


def linear(module, x):
    return torch.nn.functional.linear(x, module.weight, module.bias)


class Block(torch.nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.up = torch.nn.Linear(width, 7)
        self.down = torch.nn.Linear(7, width)

    def forward(self, x):
        return x + linear(self.down, torch.tanh(linear(self.up, x)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.gain = torch.nn.Parameter(torch.tensor(1.1))
        self.unused = torch.nn.Linear(5, 5)

    def forward(self, x):
        x = self.blocks[1].forward(self.blocks[0].forward(linear(self.first, x)))
        return linear(self.frozen, x) * self.gain


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left = torch.nn.Linear(4, 5)
        self.right = torch.nn.Linear(4, 5)

    def forward(self, x, left):
        return linear(self.left if left else self.right, x)


def made(cls, seed):
    torch.manual_seed(seed)
    return cls()


def jit(model, names, options, executors=None):
    import thunder

    pipeline = tx.registry.resolve(names, options=options)
    return thunder.jit(model, transforms=pipeline, **({"executors": executors} if executors else {}))


def loss_of(model, batch):
    inputs = batch if isinstance(batch, tuple) else (batch,)
    return model(*inputs).float().square().mean()


def batches(count):
    torch.manual_seed(8)
    return [[torch.randn(3, 4) for _ in range(dist.get_world_size())] for _ in range(count)]


def mine(per_microbatch):
    return [per_rank[dist.get_rank()] for per_rank in per_microbatch]


def small(results, tolerance=TOLERANCE):
    for rank, errors in enumerate(results):
        assert errors, "no case ran"
        assert {case: e for case, e in errors.items() if not e <= tolerance} == {}, f"rank {rank}"


# -- a mesh of replicas and shards -----------------------------------------------------------------------------------


def mesh_of(shape):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def hybrid(*cases):
    errors = {}
    for shape, zero in cases:
        mesh = mesh_of(shape)
        groups = {"fsdp": {"process_group": mesh["shard"]}, "ddp": {"process_group": mesh["replicate"]}}
        shard = mesh["shard"].get_group()
        options = {"fsdp": groups["fsdp"] | {"zero": zero}, "ddp": groups["ddp"]}
        model, plain = jit(made(Net, 100 + dist.get_rank()), ["ddp", "fsdp"], options), made(Net, 100)
        data = batches(3)
        accumulate_eager(plain, loss_of, data)
        for name, style in STYLES.items():
            model.zero_grad()
            style(model, loss_of, mine(data))
            errors[f"{shape}, {name}"] = max(gradient_errors(model, plain, shard).values())
        for norm_type in (1.0, 2.0, float("inf")):
            model.zero_grad()
            plain.zero_grad()
            accumulate_eager(plain, loss_of, data)
            reduce_each(model, loss_of, mine(data))
            found = tx.handle(model).clip_grad_norm_(0.1, norm_type)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
            errors[f"{shape}, norm {norm_type}"] = (found / expected - 1).abs().item()
            errors[f"{shape}, clipped by {norm_type}"] = max(gradient_errors(model, plain, shard).values())
        model, plain = jit(made(Branches, 100 + dist.get_rank()), ["fsdp", "ddp"], groups), made(Branches, 100)
        data = [[(x, k < 2) for x in per_rank] for k, per_rank in enumerate(batches(3))]
        accumulate_eager(plain, loss_of, data)
        one_context(model, loss_of, mine(data))
        errors[f"{shape}, branches"] = max(gradient_errors(model, plain, shard).values())
    return errors


@needs_ddp
def test_two_ranks_that_replicate_or_shard(ranks):
    """U19: with and without no_sync, the norm of the gradient of the whole model, other branches."""
    small(ranks.run(hybrid, ((2, 1), 2), ((1, 2), 3)))


@needs_ddp
def test_two_replicas_of_two_shards(four_ranks):
    """U19."""
    small(four_ranks.run(hybrid, ((2, 2), 3)))


@needs_ddp
def test_one_group_for_both_is_refused_at_resolution():
    """U18."""
    with pytest.raises(tx.errors.ConflictError, match=r"'ddp' and 'fsdp'.*process_group"):
        tx.registry.resolve(["fsdp", "ddp"])
    with pytest.raises(tx.errors.ResolutionError, match="fsdp"):
        tx.registry.resolve(["fsdp", "fsdp"])


def refused(make):
    """What every rank is told, and that it is told at all."""
    torch.manual_seed(0)
    model = Net()
    before = [(p, p.detach().clone()) for p in model.parameters()]
    try:
        make(model)
    except tx.errors.XformError as error:
        assert all(torch.equal(p, value) for p, value in before)
        return type(error).__name__, str(error)


def same_ranks():
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    return refused(lambda m: jit(m, ["fsdp", "ddp"], {"fsdp": {"process_group": a}, "ddp": {"process_group": b}}))


@needs_ddp
def test_two_groups_of_the_same_ranks_are_refused(ranks):
    """U18, where the options do not tell."""
    for kind, text in ranks.run(same_ranks):
        assert kind == "ParallelError"
        assert "ranks 0 and 1" in text


def crooked():
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    rank = dist.get_rank()
    options = {"fsdp": {"process_group": shards[rank // 2]}, "ddp": {"process_group": replicas[rank // 3]}}
    return refused(lambda m: jit(m, ["fsdp", "ddp"], options))


@needs_ddp
def test_groups_that_are_no_mesh_are_refused(four_ranks):
    """Ranks 0 and 1 share both groups; 2 and 3 learn of it through theirs."""
    for kind, text in four_ranks.run(crooked):
        assert kind == "ParallelError"
        assert "ranks 0 and 1" in text


# -- agreement -------------------------------------------------------------------------------------------------------


def disagree(what):
    rank = dist.get_rank()
    options = {"fsdp": {"zero": 2 + rank if what == "options" else 3}}
    names = ["fsdp", "lora"] if what == "plugins" and rank else ["fsdp"]

    def make(model):
        if what == "model" and rank:
            model.extra = torch.nn.Linear(2, 2)
        if what == "one rank":
            options["fsdp"]["units"] = ["Block"] if rank else "block"
        jit(model, names, options)

    return refused(make)


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("options", "zero"),
        pytest.param("plugins", "lora", marks=needs_lora),
        ("model", "extra.weight"),
        ("one rank", "units"),
    ],
)
def test_ranks_that_disagree_are_told_before_anything_changes(ranks, what, difference):
    (kind, text), other = ranks.run(disagree, what)
    assert (kind, text) == other
    assert kind == "ParallelError"
    assert difference in text


# -- adapters --------------------------------------------------------------------------------------------------------


class Adapted(Net):
    """The same in eager mode with adapters of rank 2 and scaling 2, the base frozen."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.adapters = torch.nn.ParameterDict()
        for name, module in self.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "unused":
                a, b = torch.randn(2, module.in_features) / 5, torch.randn(module.out_features, 2) / 5
                self.adapters[f"{name}_lora_A".replace(".", "_")] = torch.nn.Parameter(a)
                self.adapters[f"{name}_lora_B".replace(".", "_")] = torch.nn.Parameter(b)

    def of(self, name):
        key = name.replace(".default.weight", "").replace(".", "_")
        return self.adapters[key]

    def merged(self, name):
        key = name.replace(".", "_")
        return self.get_submodule(name).weight + 2 * self.adapters[f"{key}_lora_B"] @ self.adapters[f"{key}_lora_A"]

    def forward(self, x):
        f = torch.nn.functional
        x = f.linear(x, self.merged("first"), self.first.bias)
        for name in ("blocks.0", "blocks.1"):
            block = self.get_submodule(name)
            y = torch.tanh(f.linear(x, self.merged(f"{name}.up"), block.up.bias))
            x = x + f.linear(y, self.merged(f"{name}.down"), block.down.bias)
        return f.linear(x, self.merged("frozen"), self.frozen.bias) * self.gain


def set_adapters(model, adapted):
    with torch.no_grad():
        for name, parameter in tx.handle(model).parameters.items():
            if "lora" in name and "unused" not in name:
                parameter.to_local().copy_(own_rows(adapted.of(name)))


def lora(names, fsdp, dropout):
    import thunder

    errors = {}
    plain, adapted = made(Net, 100), made(Adapted, 100)
    options = {"lora": {"r": 2, "lora_alpha": 4, "lora_dropout": dropout}, "fsdp": fsdp}
    user = made(Net, 100 + dist.get_rank())
    model = jit(user, names, options)
    handle = tx.handle(model)
    # Every rank trains the same adapters although each drew its own.
    for name, parameter in handle.parameters.items():
        if name.endswith("lora_A.default.weight"):
            whole = handle.whole(name, parameter.detach())
            gathered = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, whole)
            errors[f"{name} of the ranks"] = (gathered[0] - gathered[1]).abs().max().item()
            assert whole.abs().max() > 0
    model.eval()
    x = batches(1)[0][0]
    with torch.no_grad():
        errors["as the base at first"] = (model(x) - plain(x)).abs().max().item()
    set_adapters(model, adapted)
    adapted.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        errors["with adapters, in eval"] = (model(x) - adapted(x)).abs().max().item()
        assert (adapted(x) - plain(x)).abs().max() > 0.01
    if fsdp.get("release_originals"):
        assert all(p.is_meta for p in user.parameters())
    if not dropout:
        model.train()
    data = batches(3)
    accumulate_eager(adapted, loss_of, data)
    for name, style in STYLES.items():
        model.zero_grad()
        style(model, loss_of, mine(data))
        trained = {n: p for n, p in handle.parameters.items() if p.requires_grad and "unused" not in n}
        assert all("lora" in n for n in trained)
        assert all(p.grad is None for n, p in handle.parameters.items() if n not in trained)
        wanted = {n: own_rows(adapted.of(n).grad) for n in trained}
        found = [(p.grad.to_local() - wanted[n]).abs().max().item() for n, p in trained.items() if wanted[n].numel()]
        errors[name] = max(found, default=0.0)
    kinds = ("xform_scatter_start", "xform_stash_gradients")
    labels = [b.args[0].label for b in thunder.last_backward_traces(model)[-1].bound_symbols if b.sym.name in kinds]
    assert labels
    assert all("trainable" in label for label in labels), "a frozen bucket has no gradients"
    return errors


@needs_lora
@pytest.mark.parametrize(
    ("names", "fsdp", "dropout"),
    [
        (["fsdp", "lora"], {"zero": 3}, 0.0),
        (["lora", "fsdp"], {"zero": 2, "units": "layer", "release_originals": True}, 0.0),
        (["fsdp", "lora"], {"zero": 3, "release_originals": True}, 0.5),
    ],
    ids=str,
)
def test_adapters(ranks, names, fsdp, dropout):
    """U04, U05, U06: in any request order, frozen base, no_sync, released originals, dropout off in evaluation."""
    small(ranks.run(lora, names, fsdp, dropout))


# -- fusing executors ------------------------------------------------------------------------------------------------


def fused(names, zero):
    import thunder

    options = {"fsdp": {"zero": zero}} if names == ["fsdp"] else {}
    model = jit(made(Net, 100 + dist.get_rank()), names, options, ["sdpa", "torchcompile"])
    plain = made(Net, 100)
    data = batches(3)
    accumulate_eager(plain, loss_of, data)
    errors = {}
    reduce_each(model, loss_of, mine(data))
    errors["reduce_each"] = max(gradient_errors(model, plain).values())
    fusions = 0
    for trace in (thunder.last_traces(model)[-1], thunder.last_backward_traces(model)[-1]):
        for bsym in trace.bound_symbols:
            if bsym.sym.is_fusion:
                fusions += 1
                assert not any(inner.sym.name.startswith("xform") for inner in bsym.subsymbols)
        assert any(bsym.sym.name.startswith("xform") for bsym in trace.bound_symbols)
    assert fusions
    for style in (one_context, ends_inside):
        model.zero_grad()
        style(model, loss_of, mine(data))
        errors[style.__name__] = max(gradient_errors(model, plain).values())
    return errors


@pytest.mark.parametrize(
    ("names", "zero"),
    [(["fsdp"], 2), (["fsdp"], 3), pytest.param(["ddp"], None, marks=needs_ddp)],
    ids=str,
)
def test_fusing_executors_leave_collectives_alone(ranks, names, zero):
    """U24: equal numerics, and no collective inside a fusion."""
    small(ranks.run(fused, names, zero))


# -- optimizers ------------------------------------------------------------------------------------------------------


def norms():
    errors = {}
    data = batches(2)
    model, plain = jit(made(Net, 100), ["fsdp"], {}), made(Net, 100)
    errors["without gradients"] = tx.handle(model).clip_grad_norm_(1.0).item()
    for norm_type in (1.0, 2.0, 3.5, float("inf")):
        for largest in (0.05, 1e6):
            model.zero_grad()
            accumulate_eager(plain, loss_of, data)
            one_context(model, loss_of, mine(data))
            found = tx.handle(model).clip_grad_norm_(largest, norm_type)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), largest, norm_type)
            errors[f"norm {norm_type}"] = (found / expected - 1).abs().item()
            errors[f"clipped to {largest} by {norm_type}"] = max(gradient_errors(model, plain).values())
            assert found.dtype == expected.dtype
    with pytest.raises(tx.errors.ParallelError, match="order 0"):
        tx.handle(model).clip_grad_norm_(1.0, 0.0)
    return errors


def test_gradient_norm_is_that_of_the_whole_model(ranks):
    """U14."""
    small(ranks.run(norms))


def optimizers():
    """Shards may be empty: a scalar's on rank 1."""
    errors = {}
    data = batches(1)
    for kind, extra in [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False}),
    ]:
        model, plain = jit(made(Net, 100), ["fsdp"], {}), made(Net, 100)
        ours, theirs = (kind(m.parameters(), lr=0.01, **extra) for m in (model, plain))
        for _ in range(3):
            accumulate_eager(plain, loss_of, data)
            model.zero_grad()
            reduce_each(model, loss_of, mine(data))
            ours.step()
            theirs.step()
        state, expected = tx.handle(model).state_dict(), plain.state_dict()
        errors[f"{kind.__name__} {extra}"] = max((state[n] - t).abs().max().item() for n, t in expected.items())
    return errors


def test_optimizers_on_shards(ranks):
    """Within 1e-5: Adam divides by the root of squares of small gradients."""
    small(ranks.run(optimizers), 1e-5)


def plain_optimizer():
    module = made(Net, 100)
    optimizer = torch.optim.AdamW(module.parameters())
    model = jit(module, ["fsdp"], {})
    with contextlib.suppress(tx.errors.PipelineError):
        loss_of(model, batches(1)[0][0]).backward()
        return type(optimizer).__name__


def test_an_optimizer_of_the_plain_model_is_noticed(ranks):
    """U13."""
    assert ranks.run(plain_optimizer) == [None, None]
