"""V25: parts of a transformed model run with the tensors that it holds now, or say why they cannot."""

import copy

import pytest
import torch
import torch.nn.functional as F

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.testing import pipeline_of


class Copied(tx.Plugin):
    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in (*params, *params.buffers):
            params.replace(name, params.tensor(name).clone())


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        self.gain = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.ones(3))
        self.layers = [self.enc]
        self.scale = 1.0

    def forward(self, x):
        return self.enc(x) * self.gain * self.scale + self.shift

    def logits(self, x):
        return F.linear(x, self.enc[0].weight) * self.gain

    def generate(self, x):
        return self(x) + 1

    def through_a_list(self, x):
        return self.layers[0](x)


def trained(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_parts_have_the_current_values():
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(4, 3)
    untrained, reference = copy.deepcopy(plain), copy.deepcopy(plain)
    model = thunder.jit(plain, transforms=pipeline_of(copied=Copied(None)))
    trained(model, x), trained(reference, x)
    for read in (
        lambda m: m.enc(x),
        lambda m: m.get_submodule("enc")(x),
        lambda m: m.get_submodule("enc.0")(x),
        lambda m: F.linear(x, m.enc[0].weight),
        lambda m: m.gain,
        lambda m: m.logits(x),
        lambda m: m.generate(x),
        lambda m: m.through_a_list(x),
        lambda m: m.layers[0](x),
        lambda m: m.enc[1].running_mean,
        lambda m: torch.cat([p.flatten() for p in m.enc.parameters()]),
        lambda m: m.enc.state_dict()["1.running_var"],
    ):
        torch.testing.assert_close(read(model), read(reference))
    assert isinstance(model.enc, torch.nn.Sequential)
    assert model.enc[0].weight is model.get_parameter("enc.0.weight")
    model.enc(x).sum().backward(), reference.enc(x).sum().backward()
    torch.testing.assert_close(model.get_parameter("enc.0.bias").grad, reference.enc[0].bias.grad)

    # Attributes and modes are the user's module's own; a buffer that is assigned is the compiled model's.
    for m in (model, reference):
        m.scale = 3.0
        m.enc.eval()
        m.shift = torch.full((3,), 2.0)
        m.enc[1].running_mean = torch.ones(3)
    torch.testing.assert_close(model(x), reference(x))
    assert (plain.scale, plain.enc[1].training) == (3.0, False)
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        assert torch.equal(tensor, untrained.state_dict()[name]), name

    replaced = "{!r} of the transformed Net cannot be replaced, added or removed. Change values in place, or the plain "
    replaced += "model before thunder.jit."
    alone = "Running 'enc' of the transformed Net by itself would go past the transforms: thunder.jit would compile it "
    alone += "without them. Call the model itself."
    copied = "'enc' of the transformed Net cannot be copied: it is a view. Copy the plain model's, and load this one's "
    copied += "state_dict() into the copy."
    for attempt, message in (
        (lambda: setattr(model, "gain", torch.nn.Parameter(torch.ones(3))), replaced.format("gain")),
        (lambda: setattr(model.enc[0], "weight", None), replaced.format("enc.0.weight")),
        (lambda: setattr(model, "enc", torch.nn.Linear(3, 3)), replaced.format("enc")),
        (lambda: delattr(model.enc[0], "bias"), replaced.format("enc.0.bias")),
        (
            lambda: copy.deepcopy(model.enc),
            copied,
        ),
        (
            lambda: model.enc.half(),
            "'enc' of the transformed Net cannot be moved or converted. Convert the plain model before thunder.jit.",
        ),
        (lambda: thunder.jit(model.enc)(x), alone),
        (lambda: thunder.jit(torch.nn.Sequential(model.enc))(x), alone),
    ):
        with pytest.raises(tx.errors.PipelineError) as caught:
            attempt()
        assert str(caught.value) == message


class Packed(tx.Plugin):
    """Stores a weight in another form."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        params.replace("enc.0.weight", params.tensor("enc.0.weight").flatten().clone(), layout="packed")


class Rewriting(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computation, ctx):
        return computation.rewrite("linear", lambda op, edit: op.call() * 2)


def test_parts_that_differ_from_the_compiled_model_are_refused():
    x = torch.randn(4, 3)
    model = thunder.jit(Net(), transforms=pipeline_of(packed=Packed(None)))
    for read in (
        lambda: model.enc[0].weight,
        lambda: model.enc(x),
        lambda: model.logits(x),
        lambda: model.enc.state_dict(),
    ):
        with pytest.raises(tx.errors.PipelineError) as caught:
            read()
        assert str(caught.value) == (
            "'enc.0.weight' of the transformed Net is held as 'packed' by 'packed'. Read "
            "thunder_xform.handle(model).state_dict()['enc.0.weight']."
        )
    model = thunder.jit(Net(), transforms=pipeline_of(rewriting=Rewriting(None)))
    for run, part in (
        (lambda: model.enc(x), "enc"),
        (lambda: model.through_a_list(x), "enc"),
        (lambda: model.enc[0](x), "enc.0"),
    ):
        with pytest.raises(tx.errors.PipelineError) as caught:
            run()
        assert str(caught.value) == (
            f"Running {part!r} of the transformed Net by itself would go past the transforms: 'rewriting' changed what "
            f"the model computes. Call the model itself."
        )
    torch.testing.assert_close(model.generate(x), model(x) + 1)
