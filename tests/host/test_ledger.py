"""The ledger against a plain model of it: a list of (stage, facts) for each tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import thunder_xform  # noqa: F401
from thunder_xform.errors import PipelineError
from thunder_xform.host.ledger import Ledger
from thunder_xform.host.parameters import Parameters

from thunder.core.module import ThunderModule  # isort: skip


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 2, bias=False)
        self.b = nn.Linear(3, 2)
        self.c = nn.Linear(3, 2)
        self.c.weight = self.a.weight
        self.register_buffer("scale", torch.ones(2))
        self.c.register_buffer("scale", self.scale)


def fresh():
    model = Tied()
    return model, Ledger(ThunderModule(model, None))


NAMES = ("a.weight", "b.weight", "b.bias", "c.weight", "c.bias")
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("replace", "flatten", "freeze", "train", "add")),
        st.integers(0, 2),  # how many plugins further
        st.sampled_from(NAMES),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(ACTIONS)
def test_versions_by_plugin(actions):
    model, ledger = fresh()
    tied = {"c.weight": "a.weight"}
    facts = {
        name: [(-1, (tuple(p.shape), tuple(p.shape), p.requires_grad, "model"))] for name, p in model.named_parameters()
    }
    stage, added = 0, 0
    for action, step, name in actions:
        stage += step
        owner = f"plugin{stage}"
        params = Parameters(ledger, stage, owner)
        key = tied.get(name, name)
        shape, stored, trains, _ = facts[key][-1][1]
        if action == "add":
            added += 1
            params.add(f"{name}.extra{added}", torch.ones(added), requires_grad=bool(added % 2))
            facts[f"{name}.extra{added}"] = [(stage, ((added,), (added,), bool(added % 2), owner))]
            continue
        if action == "replace":
            stored = (*shape[:-1], shape[-1] + 1)
            params.replace(name, torch.zeros(stored), layout="padded")
        elif action == "flatten":
            stored = (torch.Size(stored).numel(),)
            params.replace(name, params.tensor(name).reshape(-1), layout="flat")
        elif (action == "train") == trains:
            params.set_requires_grad(name, action == "train")
            continue
        else:
            trains = action == "train"
            params.set_requires_grad(name, trains)
        facts[key].append((stage, (shape, stored, trains, owner)))

    assert set(ledger) == {*facts, "scale"}
    for name, history in facts.items():
        for at in range(-1, stage + 2):
            known = [fact for written, fact in history if written <= at]
            version = ledger.at(name, at)
            if not known:
                assert version is None
                continue
            assert (version.shape, version.stored_shape, version.requires_grad, version.owner) == known[-1]
            assert version.origin == history[0][1][3]
        live = ledger.tensor(name)
        assert (tuple(live.shape), live.requires_grad) == history[-1][1][1:3]
        assert ledger.latest(name) == ledger.at(name, stage + 1)
    assert ledger.tensor("c.weight") is ledger.tensor("a.weight")
    # The user's module is untouched, whatever happened.
    assert model.c.weight is model.a.weight
    assert all(p.requires_grad and p.ndim == len(tuple(p.shape)) for p in model.parameters())
    assert ledger.original("c.weight") is model.a.weight


def test_tied_tensors_have_one_version_and_all_their_names():
    model, ledger = fresh()
    assert list(ledger) == ["a.weight", "b.weight", "b.bias", "c.bias", "scale"]
    assert ledger.aliases("c.weight") == ("a.weight", "c.weight") == ledger.aliases("a.weight")
    assert ledger.aliases("c.scale") == ("scale", "c.scale")
    assert ledger.canonical("c.weight") == "a.weight"
    assert "c.weight" in ledger
    params = Parameters(ledger, 0, "plugin")
    params.replace("c.weight", torch.zeros(2, 3))
    overrides = ledger.module._overrides_parameters
    assert overrides["a.weight"] is overrides["c.weight"] is params.tensor("a.weight")
    assert dict(ledger.module.named_parameters()).keys() == {"a.weight", "b.weight", "b.bias", "c.bias"}
    params.replace("scale", torch.zeros(2))
    assert dict(ledger.module.named_buffers())["scale"] is params.tensor("c.scale")
    assert torch.equal(model.scale, torch.ones(2))


def test_iteration_is_over_parameters_and_buffers_are_apart():
    _, ledger = fresh()
    params = Parameters(ledger, 0, "plugin")
    params.add("more", torch.ones(1), kind="buffer")
    assert tuple(params) == ("a.weight", "b.weight", "b.bias", "c.bias")
    assert params.buffers == ("scale", "more")
    assert "more" in params
    assert "missing" not in params


def test_a_user_who_freezes_a_parameter_is_seen():
    model, ledger = fresh()
    model.b.bias.requires_grad_(False)
    assert ledger.latest("b.bias").requires_grad is False
    Parameters(ledger, 0, "plugin").replace("b.bias", torch.zeros(2))
    assert ledger.at("b.bias", 0).requires_grad is False


def test_freezing_shares_the_storage():
    model, ledger = fresh()
    params = Parameters(ledger, 0, "plugin")
    params.set_requires_grad("b.weight", False)
    assert params.tensor("b.weight").data_ptr() == model.b.weight.data_ptr()
    assert params.tensor("b.weight").requires_grad is False
    assert model.b.weight.requires_grad is True


def test_what_cannot_be_done_is_refused_by_name_and_nothing_changes():
    _, ledger = fresh()
    params = Parameters(ledger, 1, "second")
    Parameters(ledger, 0, "first").add("a.weight.extra", torch.ones(2))
    before = {name: (ledger.latest(name), ledger.tensor(name)) for name in ledger}
    with pytest.raises(PipelineError, match=r"'second' adds 'a.weight.extra', which 'first' added already"):
        params.add("new", torch.ones(2), aliases=("a.weight.extra",))
    with pytest.raises(PipelineError, match=r"'second' adds 'c.weight', which 'model' added already"):
        params.add("c.weight", torch.ones(2))
    with pytest.raises(PipelineError, match=r"stores 'b.bias' as \(3,\), but its logical shape is \(2,\)"):
        params.replace("b.bias", torch.ones(3))
    for call in (params.version, params.tensor, params.aliases, params.canonical, params.original):
        with pytest.raises(PipelineError, match=r"named 'b.wieght'. Did you mean 'b.weight'"):
            call("b.wieght")
    assert {name: (ledger.latest(name), ledger.tensor(name)) for name in ledger} == before


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.uint8), torch.ones(2, dtype=torch.int64)])
def test_integer_tensors_never_train(tensor):
    _, ledger = fresh()
    params = Parameters(ledger, 0, "plugin")
    params.add("packed", tensor)
    assert params.version("packed").requires_grad is False
    params.replace("b.bias", tensor)
    assert params.version("b.bias").requires_grad is False
    assert params.version("b.bias").dtype == tensor.dtype


def test_releasing_originals_frees_only_what_was_replaced():
    model, ledger = fresh()
    params = Parameters(ledger, 0, "plugin")
    params.replace("c.weight", torch.zeros(2, 3))
    params.set_requires_grad("b.weight", False)
    kept = model.b.weight
    ledger.release_originals()
    assert model.a.weight.is_meta
    assert model.a.weight is model.c.weight
    assert model.b.weight is kept
    assert not any(p.is_meta for p in (model.b.bias, model.c.bias, model.scale))
    assert ledger.latest("a.weight").device == torch.device("cpu")
