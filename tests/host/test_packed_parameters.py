"""What a plugin needs to hold a parameter in several tensors, and others to find the layer that it belongs to."""

import pytest
import torch
from torch import nn

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.errors import PipelineError
from thunder_xform.testing import assert_same_numerics, pipeline_of

scale = tx.operator(
    "test_packed_scale",
    meta=lambda codes, factor: tx.tensor_like(codes, dtype=factor.dtype),
    fn=lambda codes, factor: codes * factor,
    backward=lambda inputs, outputs, gradients: [None, None],
)
scaled_linear = tx.operator(
    "test_packed_linear",
    meta=lambda x, codes, bias, factor: tx.tensor_like(x, shape=(*x.shape[:-1], codes.shape[0])),
    fn=lambda x, codes, bias, factor: nn.functional.linear(x, codes * factor, bias),
    linear_weight=1,
    linear_bias=2,
)


class Packed(tx.Plugin):
    """Holds every matrix as integers and one factor; the models below have such weights."""

    def __init__(self, *, fused=False, returned=1, decodes=True):
        super().__init__(None)
        self.decodes = decodes
        self.fused = fused
        self.returned = returned

    @tx.hookimpl
    def update_model_state(self, params):
        for name in [name for name in params if len(params.version(name).shape) == 2]:
            codes = params.tensor(name).detach().mul(4).to(torch.int8)
            decode = self.decoder(params, name) if self.decodes else None
            params.replace(name, codes, requires_grad=False, layout="quarters", decode=decode)
            params.add(f"{name}.factor", torch.tensor(0.25), requires_grad=False)
        self.names = tuple(name for name in params if f"{name}.factor" in params)

    def decoder(self, params, name):
        return lambda: params.tensor(name) * params.tensor(f"{name}.factor")

    @tx.hookimpl
    def before_autograd(self, computation):
        computation = computation.restore(
            [
                ((name, f"{name}.factor"), lambda *tensors: (scale(*tensors),) + (None,) * self.returned)
                for name in self.names
            ],
            recompute=True,
        )
        if not self.fused:
            return computation
        return computation.rewrite(lambda operation: operation.linear_weight in self.names, self.fuse)

    def fuse(self, operation, edit):
        x, _, bias = operation.args
        name = operation.linear_weight
        return scaled_linear(x, edit.stored(name), bias, edit.stored(f"{name}.factor"))


class Doubled(tx.Plugin):
    """Doubles what linear layers with a bias contribute, and adds the sum of their weight."""

    @tx.hookimpl
    def before_autograd(self, computation):
        self.seen = [(o.linear_weight, o.linear_bias) for o in computation.operations() if o.linear_weight]
        return computation.rewrite(
            lambda operation: operation.linear_weight == "up.weight",
            lambda operation, edit: operation.call() * 2 + tx.ops.sum(edit.parameter("up.weight")),
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 3, bias=False)
        with torch.no_grad():
            for weight in (self.up.weight, self.down.weight):
                weight.copy_(torch.randint(-8, 8, weight.shape) / 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.down.weight.sum()


class DoubledNet(Net):
    def forward(self, x):
        return self.down(torch.relu(self.up(x) * 2 + self.up.weight.sum())) + self.down.weight.sum()


def frozen(cls):
    torch.manual_seed(3)
    model = cls()
    model.up.weight.requires_grad_(False)
    model.down.weight.requires_grad_(False)
    return model


def test_values_are_restored_from_several_tensors_for_whoever_reads_them():
    torch.manual_seed(1)
    # The input's gradient flows through the restored weights, too.
    x = torch.randn(5, 4)
    model = assert_same_numerics(frozen(Net), (x,), pipeline_of(packed=Packed()), calls=2)
    assert tx.handle(model).parameters["up.weight"].dtype == torch.int8


@pytest.mark.parametrize("fused", [False, True])
def test_later_plugins_find_linear_layers_and_their_weights_whatever_stands_for_them(fused):
    torch.manual_seed(1)
    doubled = Doubled(None)
    with torch.no_grad():
        x = torch.randn(5, 4)
        model = thunder.jit(frozen(Net), transforms=pipeline_of(packed=Packed(fused=fused), doubled=doubled))
        torch.testing.assert_close(model(x), frozen(DoubledNet)(x), atol=1e-6, rtol=1e-5)
    assert [name for name, _ in doubled.seen] == ["up.weight", "down.weight"]
    (_, bias), (_, none) = doubled.seen
    assert (bias.shape, none) == ((6,), None)


def test_under_autocast_linear_layers_apply_their_weights_after_a_cast():
    torch.manual_seed(1)
    doubled, x = Doubled(None), torch.randn(5, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = thunder.jit(frozen(Net), transforms=pipeline_of(packed=Packed(), doubled=doubled))(x)
        expected = frozen(DoubledNet)(x)
    assert [name for name, _ in doubled.seen] == ["up.weight", "down.weight"]
    torch.testing.assert_close(found, expected, atol=0.1, rtol=2e-2)


@pytest.mark.parametrize(("returned", "message"), [(0, "1 tensors stand for"), (2, "3 tensors stand for")])
def test_a_restoration_returns_one_tensor_or_none_for_each_name(returned, message):
    with pytest.raises(PipelineError, match=message):
        thunder.jit(frozen(Net), transforms=pipeline_of(packed=Packed(returned=returned)))(torch.randn(5, 4))


class Spare(Packed):
    @tx.hookimpl
    def before_autograd(self, computation):
        name = self.names[0]
        return computation.restore([((name, f"{name}.factor"), lambda codes, factor: (scale(codes, factor), factor))])


def test_a_name_that_the_trace_does_not_read_cannot_be_restored():
    with pytest.raises(PipelineError, match=r"'up.weight.factor': the computation does not read it"):
        thunder.jit(frozen(Net), transforms=pipeline_of(spare=Spare()))(torch.randn(5, 4))


class Values(tx.Plugin):
    """Reads the values of parameters before anything runs."""

    @tx.hookimpl
    def update_model_state(self, params):
        params.set_requires_grad("up.bias", False)
        self.values = {name: params.value(name).clone() for name in params}
        params.replace("up.weight", params.tensor("up.weight")[:, :2], layout="columns")
        with pytest.raises(PipelineError, match=r"'values' stores 'up.weight' as 'columns', and there is no way"):
            params.value("up.weight")


def test_the_value_of_a_parameter_is_what_its_tensors_encode():
    values = Values(None)
    thunder.jit(frozen(Net), transforms=pipeline_of(packed=Packed(), values=values))
    for name, parameter in frozen(Net).named_parameters():
        torch.testing.assert_close(values.values[name], parameter.detach(), atol=0, rtol=0)


def test_a_value_that_nobody_decodes_is_refused():
    pipeline = pipeline_of(packed=Packed(decodes=False), values=Values(None))
    with pytest.raises(PipelineError, match=r"'packed' stores 'up.weight' as 'quarters', and there is no way"):
        thunder.jit(frozen(Net), transforms=pipeline)
