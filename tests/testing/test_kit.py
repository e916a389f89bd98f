"""The authors' kit finds what it is there to find."""

import copy

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import ManifestError, UnknownNameError
from thunder_xform.testing import assert_same_numerics, assert_state_laws, pipeline_of
from thunder_xform.testing.fixtures import sealed_registry  # noqa: F401

import thunder  # isort: skip


class Edit(tx.Plugin):
    def __init__(self, edit):
        super().__init__(None)
        self.edit = edit

    @tx.hookimpl
    def before_autograd(self, computation):
        return computation.rewrite("linear", self.edit)


half_gradient = tx.operator(
    "test_kit_half_gradient",
    meta=lambda t: tx.tensor_like(t),
    fn=lambda t: t.clone(),
    backward=lambda inputs, outputs, gradients: (gradients[0] * 0.5,),
)


def test_equal_numerics_pass_and_the_compiled_model_comes_back():
    compiled = assert_same_numerics(nn.Linear(3, 2), (torch.randn(4, 3),), pipeline_of(nothing=tx.Plugin(None)))
    assert tx.handle(compiled).pipeline == ("nothing",)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda op, e: op.call() * 1.001, "The output 0 differs"),
        (lambda op, e: half_gradient(op.call()), "The gradient of '(weight|bias)' differs"),
        (
            lambda op, e: tx.ops.linear(op.args[0], op.args[1], half_gradient(op.args[2])),
            "The gradient of 'bias' differs",
        ),
    ],
)
def test_other_numerics_are_named(edit, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_numerics(nn.Linear(3, 2), (torch.randn(4, 3),), pipeline_of(edit=Edit(edit)))


def test_a_plugin_that_changes_the_users_module_is_found():
    class Vandal(tx.Plugin):
        @tx.hookimpl
        def update_model_state(self, ctx):
            with torch.no_grad():
                ctx.module.weight.add_(1)

    with pytest.raises(tx.errors.VerificationError, match="changes the values of 'weight' in the user's module"):
        assert_same_numerics(nn.Linear(3, 2), (torch.randn(4, 3),), pipeline_of(vandal=Vandal(None)))


class Flat(tx.Plugin):
    """Stores every parameter flat and negated; exports it as the plain model has it, or as `export` says."""

    def __init__(self, export=lambda tensor: -tensor):
        super().__init__(None)
        self.export = export

    @tx.hookimpl
    def update_model_state(self, params):
        self.shapes = {name: params.version(name).shape for name in params}
        for name in params:
            params.replace(name, -params.tensor(name).reshape(-1), layout="negated")

    @tx.hookimpl
    def export_state(self, state):
        return {name: self.export(tensor).reshape(self.shapes[name]) for name, tensor in state.items()}

    @tx.hookimpl
    def import_state(self, state):
        return {name: -tensor.reshape(-1) for name, tensor in state.items()}


def test_state_laws():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert_state_laws(thunder.jit(model, transforms=pipeline_of(flat=Flat())), plain)
    for found, wanted in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted)
    broken = thunder.jit(copy.deepcopy(model), transforms=pipeline_of(flat=Flat(export=lambda tensor: -2 * tensor)))
    with pytest.raises(AssertionError, match=r"importing what was exported changed '0\.weight'"):
        assert_state_laws(broken, plain)


MANIFEST = """
schema = 1
name = "mine"
summary = "For tests"
plugin = "builtins:object"
stage = "adapters"
"""


def test_the_sealed_registry_holds_what_was_added_and_nothing_else(sealed_registry, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("THUNDER_XFORM_DENY", "mine")
    assert tx.registry.list() == ()
    sealed_registry.add(MANIFEST)
    path = tmp_path / "manifest.toml"
    path.write_text(MANIFEST.replace("mine", "other"))
    sealed_registry.add(path, distribution="somebody", version="2")
    assert [(r.name, r.origin, r.status) for r in tx.registry.list()] == [
        ("mine", "thunder-xform-mine 0", "ok"),
        ("other", "somebody 2", "ok"),
    ]
    assert tx.registry.plan(["other", "mine"]).order == ("mine", "other")
    with pytest.raises(UnknownNameError, match="ddp"):
        tx.registry.plan(["ddp"])
    with pytest.raises(ManifestError):
        sealed_registry.add("name = 3")
