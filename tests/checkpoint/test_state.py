"""The state of a transformed model against torch's own state_dict and load_state_dict (U15)."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.testing import pipeline_of


class Scaled(tx.Plugin):
    """Stores every float parameter, flattened and divided by `factor`; refuses to import NaN."""

    def __init__(self, factor, log=None):
        super().__init__(None)
        self.factor = factor
        self.log = [] if log is None else log

    @tx.hookimpl
    def update_model_state(self, params):
        self.shapes = {}
        for name in params:
            self.shapes[name] = params.version(name).stored_shape
            stored = params.tensor(name).detach().flatten() / self.factor
            params.replace(name, stored, layout=f"{params.version(name).layout}/{self.factor}")

    @tx.hookimpl
    def export_state(self, state, ctx):
        self.log.append(("export", self.factor, ctx.state_kind))
        if ctx.state_kind == "sharded":
            return None
        return {n: (t * self.factor).view(self.shapes[n]) if n in self.shapes else t for n, t in state.items()}

    @tx.hookimpl
    def import_state(self, state, ctx):
        self.log.append(("import", self.factor, ctx.state_kind))
        if ctx.state_kind == "sharded":
            return None
        if any(t.isnan().any() for t in state.values()):
            raise ValueError("NaN")
        return {n: t.flatten() / self.factor if n in self.shapes else t for n, t in state.items()}


class Net(nn.Module):
    """Tied weights, root parameters and buffers, a shared and a non-persistent buffer, a shared module."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))
        self.tokens = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.tokens.weight
        self.first = self.second = nn.Linear(3, 3)
        self.register_buffer("mask", torch.rand(3))
        self.register_buffer("alias", self.mask)
        self.register_buffer("cache", torch.rand(3), persistent=False)

    def forward(self, tokens):
        x = self.norm(self.tokens(tokens)) * self.scale * self.mask + self.cache
        return self.head(self.second(self.first(x)))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(model, log=None):
    pipeline = pipeline_of(double=Scaled(2.0, log), quadruple=Scaled(4.0, log))
    return tx.handle(thunder.jit(model, transforms=pipeline))


def live(handle):
    ledger = handle._session.ledger
    return {name: ledger.tensor(name).detach().clone() for name in ledger}


@pytest.mark.parametrize("make_model", [Net, lambda: nn.Linear(3, 2), lambda: nn.BatchNorm1d(3), nn.Identity])
def test_u15_full_state_equals_the_plain_models(make_model):
    model = make_model()
    state = make(model).state_dict()
    expected = model.state_dict()
    assert list(state) == list(expected)
    torch.testing.assert_close(state, dict(expected), atol=0, rtol=0)
    assert not any(t.requires_grad for t in state.values())


def test_u15_full_state_loads_both_ways():
    source, target = Net(), Net()
    handle = make(source)
    plain = Net()
    plain.load_state_dict(handle.state_dict(), strict=True)
    torch.testing.assert_close(plain.state_dict(), source.state_dict(), atol=0, rtol=0)
    other = make(target)
    keys = other.load_state_dict(source.state_dict())
    assert keys == ((), ())
    torch.testing.assert_close(other.state_dict(), dict(source.state_dict()), atol=0, rtol=0)


def test_hooks_run_in_reverse_order_on_export_and_in_order_on_import():
    log = []
    handle = make(nn.Linear(2, 2), log)
    for kind in ("full", "sharded"):
        handle.load_state_dict(handle.state_dict(kind), kind)
    assert log == [
        ("export", 4.0, "full"),
        ("export", 2.0, "full"),
        ("import", 2.0, "full"),
        ("import", 4.0, "full"),
        ("export", 4.0, "sharded"),
        ("export", 2.0, "sharded"),
        ("import", 2.0, "sharded"),
        ("import", 4.0, "sharded"),
    ]
    assert all(context.state_kind is None for context in handle._session.contexts)


def test_sharded_state_is_what_is_stored():
    handle = make(Net())
    state = handle.state_dict("sharded")
    assert set(state) == {n for n in handle._session.ledger if n != "cache"}
    assert state["tokens.weight"].shape == (15,)
    before = live(handle)
    with torch.no_grad():
        saved = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.zero_()
    assert not torch.equal(live(handle)["scale"], before["scale"]), (
        "no copy: torch.distributed.checkpoint loads in place"
    )
    handle.load_state_dict(saved, "sharded")
    torch.testing.assert_close(live(handle), before, atol=0, rtol=0)


def test_loading_converts_dtypes_and_keeps_the_live_tensors():
    model = nn.Linear(3, 2)
    handle = make(model)
    tensors = dict(handle.parameters)
    handle.load_state_dict({n: torch.ones_like(t).double() for n, t in model.state_dict().items()})
    assert all(parameter is tensors[name] for name, parameter in handle.parameters.items())
    assert all(p.dtype == torch.float32 and torch.equal(p, torch.full_like(p, 1 / 8)) for p in tensors.values())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s: s.pop("scale"), "The state lacks 'scale'."),
        (
            lambda s: s.update(scal=s.pop("scale")),
            "lacks 'scale' and has unexpected 'scal' .Did you mean 'scale'",
        ),
        (lambda s: s.pop("head.weight"), "lacks 'head.weight'"),
        (lambda s: s.update(cache=torch.rand(3)), "has unexpected 'cache'"),
        (lambda s: s.update(scale=torch.rand(4)), r"'scale' has shape \(4,\) instead of \(3,\)"),
        (lambda s: s.update(scale=torch.rand(1)), r"'scale' has shape \(1,\)"),
        (
            lambda s: s.update({"norm.num_batches_tracked": torch.tensor(0.5)}),
            "is torch.float32, but the model holds",
        ),
        (lambda s: s.update(scale=torch.empty(3, device="meta")), "'scale' is on the meta device"),
        (lambda s: s.update(scale=3), "'scale' is of type int and no tensor"),
        (
            lambda s: s.update({"head.weight": torch.rand(5, 3)}),
            "'head.weight' and 'tokens.weight' are one tensor",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, problem):
    handle = make(Net())
    before = live(handle)
    state = dict(Net().state_dict())
    change(state)
    with pytest.raises(tx.errors.CheckpointError, match=problem):
        handle.load_state_dict(state)
    torch.testing.assert_close(live(handle), before, atol=0, rtol=0)


def test_a_hook_that_fails_changes_nothing():
    handle = make(Net())
    before = live(handle)
    state = dict(Net().state_dict())
    state["scale"] = torch.full((3,), float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        handle.load_state_dict(state)
    torch.testing.assert_close(live(handle), before, atol=0, rtol=0)
    assert all(context.state_kind is None for context in handle._session.contexts)


def test_not_strict_loads_what_fits_and_says_what_does_not():
    model = Net()
    handle = make(model)
    before = handle.state_dict()
    state = {"scale": torch.zeros(3), "other": torch.zeros(2)}
    keys = handle.load_state_dict(state, strict=False)
    assert keys.unexpected_keys == ("other",)
    assert set(keys.missing_keys) == set(model.state_dict()) - {"scale"}
    after = handle.state_dict()
    assert torch.equal(after.pop("scale"), torch.zeros(3))
    torch.testing.assert_close(after, {n: t for n, t in before.items() if n != "scale"}, atol=0, rtol=0)


def test_error_fields():
    handle = make(nn.Linear(2, 2))
    with pytest.raises(tx.errors.CheckpointError) as caught:
        handle.load_state_dict({"wait": torch.zeros(2, 2), "bias": torch.zeros(2)})
    assert (caught.value.missing, caught.value.unexpected) == (("weight",), ("wait",))


def test_kinds():
    handle = make(nn.Linear(2, 2))
    with pytest.raises(tx.errors.CheckpointError, match=r"no state of kind 'ful'. Did you mean 'full'"):
        handle.state_dict("ful")
    for call in (lambda: handle.state_dict("adapter"), lambda: handle.load_state_dict({}, "adapter")):
        with pytest.raises(tx.errors.CheckpointError, match="double -> quadruple has no adapters"):
            call()


def test_a_tensor_that_its_plugin_does_not_map_away_is_no_part_of_a_full_state():
    class Extra(tx.Plugin):
        @tx.hookimpl
        def update_model_state(self, params):
            params.add("extra", torch.zeros(2))

    handle = tx.handle(thunder.jit(nn.Linear(2, 2), transforms=pipeline_of(extra=Extra(None))))
    with pytest.raises(tx.errors.CheckpointError, match="'extra', added by 'extra', is no part of the plain model"):
        handle.state_dict()
    assert set(handle.state_dict("sharded")) == {"weight", "bias", "extra"}


def test_extra_state_is_refused():
    class Model(nn.Linear):
        def get_extra_state(self):
            return {"step": 1}

    handle = make(Model(2, 2))
    with pytest.raises(tx.errors.CheckpointError, match="the key '_extra_state'"):
        handle.state_dict()


def test_the_users_module_is_untouched_where_plugins_hold_copies():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    handle = make(model)
    handle.load_state_dict({**Net().state_dict(), "mask": before["mask"], "alias": before["mask"]})
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if name in parameters:
            assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.update(mask=torch.rand(3).to_sparse()), "'mask' is torch.sparse_coo and no dense tensor"),
        (lambda s: s.update(mask=torch.rand(3).to_mkldnn()), "'mask' is torch._mkldnn and no dense tensor"),
        (lambda s: s.update(mask=nn.UninitializedBuffer()), "'mask' is not initialized yet"),
        (
            lambda s: s.update(mask=torch.empty(3, dtype=torch.float4_e2m1fn_x2)),
            "'mask' is torch.float4_e2m1fn_x2, which torch cannot convert to torch.float32",
        ),
        (lambda s: s.update(mask=torch.rand(3) + 1j), "'mask' is torch.complex64, but the model holds torch.float32"),
    ],
)
def test_v35_what_cannot_be_copied_changes_nothing(change, told):
    handle = make(Net())
    before = live(handle)
    state = {name: tensor + 1 for name, tensor in Net().state_dict().items()}
    change(state)
    with pytest.raises(tx.errors.CheckpointError) as caught:
        handle.load_state_dict(state, strict=False)
    remedy = "Load it into a model of the same architecture and options."
    assert str(caught.value) == f"The state does not fit: {told}. {remedy}"
    torch.testing.assert_close(live(handle), before, atol=0, rtol=0)


def test_v35_a_model_that_cannot_be_written_to_stays_whole():
    model = nn.Linear(2, 2)
    model.register_buffer("ones", torch.ones(1).expand(3))
    with torch.inference_mode():
        model.register_buffer("made", torch.ones(3))
    handle = tx.handle(thunder.jit(model, transforms=pipeline_of(nothing=tx.Plugin(None))))
    before = live(handle)
    with pytest.raises(tx.errors.CheckpointError) as caught:
        handle.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert str(caught.value) == (
        "The model cannot be written to: 'ones' is an expanded view, 'made' was made in inference mode. "
        "Give the module clones of them before thunder.jit."
    )
    torch.testing.assert_close(live(handle), before, atol=0, rtol=0)
