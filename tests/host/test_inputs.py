"""The prologue and the computation's inputs are exactly what the ledger says, whatever plugins did to parameters."""

import copy

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import thunder_xform as tx
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip
from thunder.core import prims

double = tx.operator(
    "test_inputs_double",
    meta=lambda t: tx.tensor_like(t),
    fn=lambda t: t * 2,
    backward=lambda inputs, outputs, gradients: (gradients[0] * 2,),
)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(3))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.second(self.first(x)) + self.shift


class Acting(tx.Plugin):
    """Does to each named parameter what it is told: freeze it, add to it, or store its half."""

    def __init__(self, actions):
        super().__init__(None)
        self.actions = actions

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        self.halved = []
        for name, action in self.actions.items():
            if action == "freeze":
                params.set_requires_grad(name, False)
            elif action == "halve":
                params.replace(name, params.tensor(name) / 2)
                self.halved.append(params.canonical(name))
            elif action == "extend":
                params.add(f"{name}.{ctx.plugin}", torch.zeros(params.version(name).shape))

    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        wanted = {name: action for name, action in self.actions.items() if action == "extend"}

        def extended(operation, edit):
            inputs = list(operation.args)
            for index in (1, 2):
                name = operation.parameter(index)
                if name in wanted:
                    inputs[index] = inputs[index] + edit.parameter(f"{name}.{ctx.plugin}")
            return None if not wanted else operation.call(*inputs)

        return computation.rewrite("linear", extended).restore([((name,), double) for name in self.halved])


ACTIONS = st.dictionaries(
    st.sampled_from(("first.weight", "first.bias")), st.sampled_from(("freeze", "halve", "extend"))
)


# Shrinking would compile for minutes.
@settings(deadline=None, max_examples=10, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(st.lists(ACTIONS, min_size=1, max_size=3))
def test_prologue_and_inputs_follow_the_ledger(plugins):
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(2, 3)
    pipeline = pipeline_of(**{f"plugin{i}": Acting(actions) for i, actions in enumerate(plugins)})
    compiled = thunder.jit(model, transforms=pipeline)
    found = compiled(x)
    torch.testing.assert_close(found, model(x))

    prologue = thunder.last_prologue_traces(compiled)[len(plugins)]
    computation = next(
        t for t in thunder.last_traces(compiled) if f"plugin{len(plugins) - 1}" in str(t.get_provenance())
    )
    arguments = [a.name for a in computation.args]
    unpacked = {
        b.output.name: b.args[1]
        for b in prologue.bound_symbols
        if b.sym in (prims.unpack_parameter, prims.unpack_buffer)
    }
    live = dict(compiled.named_parameters()) | dict(compiled.named_buffers())
    # Each input once, tied ones too, and nothing else, but what Thunder itself looks at: all parameters of the root.
    assert sorted(unpacked) == sorted([*arguments[1:], "t_unused"])
    assert [p.name for p in prologue.bound_symbols[-1].args[0][0]] == arguments
    checks = {
        b.args[0].name: b.args[1:] for b in prologue.bound_symbols if b.sym is prims.check_tensor_shape_and_metadata
    }
    assert checks.keys() == {*arguments, "t_unused"}
    for proxy, name in unpacked.items():
        tensor = live[name]
        assert checks[proxy] == (tuple(tensor.shape), str(tensor.device), tensor.dtype, tensor.requires_grad)

    trained = {name: p for name, p in compiled.named_parameters() if p.requires_grad and name != "unused"}
    if trained:
        found.sum().backward()
        assert all(p.grad is not None for p in trained.values())
    assert thunder.cache_misses(compiled) == 1
    compiled(x)
    assert thunder.cache_misses(compiled) == 1


class Inspecting(nn.Module):
    """Asks a parameter for its dtype and shape, and computes without it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.template = nn.Parameter(torch.ones(5))

    def forward(self, x):
        x = x.to(self.template.dtype)
        return self.linear(x) if self.template.shape[0] == 5 else x


def test_a_parameter_that_is_only_inspected_may_be_stored_otherwise():
    class Packed(tx.Plugin):
        @tx.hookimpl
        def update_model_state(self, params):
            params.replace("template", torch.ones(2, 2), layout="packed", requires_grad=False)

    model, x = Inspecting(), torch.randn(2, 3)
    compiled = thunder.jit(model, transforms=pipeline_of(packed=Packed(None), later=tx.Plugin(None)))
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x)
    assert (thunder.cache_misses(compiled), thunder.cache_hits(compiled)) == (1, 1)
    compiled.get_parameter("template").requires_grad_(True)
    compiled(x)
    assert thunder.cache_misses(compiled) == 2


class Trains(tx.Plugin):
    def __init__(self, flag):
        super().__init__(None)
        self.flag = flag

    @tx.hookimpl
    def update_model_state(self, params):
        params.set_requires_grad("first.weight", self.flag)


@pytest.mark.parametrize("first", ["restored", "trains"])
@pytest.mark.parametrize("flag", [True, False])
def test_training_follows_the_last_plugin_also_for_restored_parameters(first, flag):
    model, x = Tied(), torch.randn(2, 3)
    model.first.weight.requires_grad_(not flag)
    plugins = {"restored": Acting({"first.weight": "halve"}), "trains": Trains(flag)}
    order = ["restored", "trains"] if first == "restored" else ["trains", "restored"]
    compiled = thunder.jit(model, transforms=pipeline_of(**{name: plugins[name] for name in order}))
    compiled(x).square().sum().backward()
    gradient = compiled.get_parameter("first.weight").grad
    if not flag:
        assert gradient is None
        return
    plain = copy.deepcopy(model)
    plain.first.weight.requires_grad_(True)
    plain(x).square().sum().backward()
    torch.testing.assert_close(gradient, 2 * plain.first.weight.grad)
    assert model.first.weight.requires_grad is False
