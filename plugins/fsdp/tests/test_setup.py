"""From the user's module to shards: where values come from, what is refused, what is released."""

import pytest
import torch
import torch.distributed as dist

import thunder_xform as tx
from thunder_xform.testing.accumulation import own_rows
from thunder_xform_fsdp.options import Options


def jit(model, **options):
    import thunder

    return thunder.jit(model, transforms=tx.registry.resolve(["fsdp"], options={"fsdp": options}))


def refused(make):
    try:
        make()
    except tx.errors.XformError as error:
        return type(error).__name__, str(error)


# -- meta device -----------------------------------------------------------------------------------------------------


class Known(torch.nn.Module):
    """Initializes itself to known values, in parameters, buffers and, thoughtlessly, in its child."""

    def __init__(self, rows, start):
        super().__init__()
        self.start = start
        self.weight = torch.nn.Parameter(torch.empty(rows, 4))
        self.frozen = torch.nn.Parameter(torch.empty(4), requires_grad=False)
        self.register_buffer("offset", torch.empty(4))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.child = torch.nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self):
        for number, tensor in enumerate((self.weight, self.frozen, self.offset, self.table)):
            count = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device).view(tensor.shape)
            tensor.data.copy_(self.start + number + count / 7)
        torch.nn.init.zeros_(self.child.bias)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight) * self.frozen.sum() + (self.offset + self.table).sum()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Known(5, 0.5)
        self.second = Known(1, 0.25)
        self.tied = torch.nn.Linear(4, 5, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return (
            self.first.forward(x).sum()
            + self.second.forward(x).sum()
            + torch.nn.functional.linear(x, self.tied.weight).sum()
        )


def from_meta(meta_init):
    with torch.device("meta"):
        module = Net()
    expected = Net()
    # One child is real: initializing its owner must not touch it.
    module.second.child = torch.nn.Linear(4, 4)
    before = module.second.child.bias.detach().clone()
    model = jit(module, meta_init=meta_init)
    assert torch.equal(module.second.child.bias, before)
    assert module.first.weight.is_meta
    handle = tx.handle(model)
    state = expected.state_dict()
    if meta_init == "empty":
        assert all(
            not p.full_tensor().any()
            for n, p in handle.parameters.items()
            if n != "second.child.weight" and "bias" not in n
        )
        handle.load_state_dict(state)
    for name, tensor in handle.parameters.items():
        if "child" not in name:
            assert torch.equal(tensor.to_local(), own_rows(state[name])), name
    for name, tensor in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), tensor), name
    x = torch.randn(3, 4)
    return (model(x) - expected(x)).abs().item()


@pytest.mark.parametrize("meta_init", ["reset", "empty"])
def test_meta_models_are_initialized_or_loaded(ranks, meta_init):
    assert max(ranks.run(from_meta, meta_init)) < 1e-4


def random_from_meta():
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Embedding(9, 30))
    model = jit(module)
    return tx.handle(model).state_dict()


def test_random_initialization_is_the_same_on_all_ranks(ranks):
    first, second = ranks.run(random_from_meta)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
    bound = 30**-0.5
    assert 0.9 * bound < first["0.weight"].abs().max() <= bound
    assert 0.8 < first["1.weight"].std() < 1.2


class Bare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.scale * self.table


def bare_meta():
    found = []
    for meta_init in ("reset", "empty"):
        with torch.device("meta"):
            module = Bare()
        names = list(module.state_dict())
        found.append(refused(lambda module=module, meta_init=meta_init: jit(module, meta_init=meta_init)))
        assert all(p.is_meta for p in module.parameters())
        assert list(module.state_dict()) == names
    return found


def test_what_cannot_be_initialized_is_refused(ranks):
    for (kind, text), (kind_empty, text_empty) in ranks.run(bare_meta):
        assert kind == kind_empty == "PipelineError"
        assert "'scale'" in text
        assert "Bare has no reset_parameters()" in text
        assert "'table'" in text_empty
        assert "persistent" in text_empty


# -- values ----------------------------------------------------------------------------------------------------------


def sources():
    rank = dist.get_rank()
    found = {}
    for source in (0, 1, None):
        module = torch.nn.Linear(3, 4)
        torch.nn.init.constant_(module.weight, 10 + rank)
        model = jit(module, broadcast_from=source)
        assert module.weight[0, 0] == 10 + rank
        found[source] = tx.handle(model).state_dict()["weight"][:, 0].tolist()
    found["error"] = refused(lambda: jit(torch.nn.Linear(3, 4), broadcast_from=2))
    found["one rank"] = refused(lambda: jit(torch.nn.Linear(3, 4), units=["block" if rank else "Linear"]))
    return found


def test_values_come_from_one_rank_or_from_all(ranks):
    for found in ranks.run(sources):
        assert found[0] == [10] * 4
        assert found[1] == [11] * 4
        assert found[None] == [10, 10, 11, 11]
        assert found["error"][0] == "ParallelError"
        assert "2 ranks" in found["error"][1]
        assert found["one rank"][0] == "ParallelError"


def released():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    module[0].weight.requires_grad_(False)
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = jit(module, release_originals=True)
    assert all(p.is_meta for p in module.parameters())
    assert module[0].bias.requires_grad
    assert not module[0].weight.requires_grad
    model(torch.randn(6, 4)).square().sum().backward()
    assert model.get_parameter("0.bias").grad is not None
    state = tx.handle(model).state_dict()
    for name in ("0.weight", "0.bias", "1.weight"):
        assert torch.equal(state[name], expected[name]), name
    return True


def test_originals_are_released_on_request(ranks):
    assert all(ranks.run(released))


# -- units -----------------------------------------------------------------------------------------------------------


def test_units_of_a_model():
    from thunder_xform_fsdp.units import unit_of, unit_paths

    block = lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))  # noqa: E731
    model = torch.nn.ModuleDict(
        {
            "trunk": torch.nn.Sequential(block(), block(), torch.nn.Linear(2, 2)),
            "heads": torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]),
            "single": torch.nn.ModuleList([block()]),
        }
    )
    assert unit_paths(model, "block") == ("trunk.0", "trunk.1")
    assert unit_paths(model, "none") == ()
    assert unit_paths(model, ["Linear", "trunk.0"])[-1] == "trunk.0"
    assert set(unit_paths(model, "layer")) == {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert unit_of("trunk.0.2.weight", ("trunk.0", "trunk.0.2"), "layer") == "trunk.0.2"
    assert unit_of("trunk.01.weight", ("trunk.0",), "block") == ""
    assert unit_of("trunk.0.2.weight", (), "none") == "trunk.0.2.weight"
    with pytest.raises(tx.errors.PipelineError, match=r"'Liner'.*Linear"):
        unit_paths(model, ["Liner"])


def test_options_are_checked():
    assert Options(units=[torch.nn.Linear, "trunk.0"]).units == ("Linear", "trunk.0")
    for wrong in (
        {"prefetch": -1},
        {"units": "blocks"},
        {"gather_dtype": "bf16"},
        {"reduce_dtype": "int8"},
        {"units": [3]},
    ):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} "):
            Options(**wrong)
    with pytest.raises(tx.errors.OptionError, match="zero"):
        tx.registry.resolve(["fsdp"], options={"fsdp": {"zero": 1}})
    with pytest.raises(tx.errors.XformError, match="prefetch"):
        tx.registry.resolve(["fsdp"], options={"fsdp": {"prefech": 1}})
