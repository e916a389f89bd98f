"""A transformed model behaves as one ordinary module, alone and inside others (U25); pipelines in thunder.compile."""

import copy

import pytest
import thunder
import torch
from thunder.transforms.prune_prologue_checks import PrunePrologueChecks

import thunder_xform as tx
from thunder_xform.testing import pipeline_of


class Extended(tx.Plugin):
    """Doubles parameters, freezes the first, and adds one that the model does not have."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in params:
            params.replace(name, params.tensor(name).detach() * 2)
        params.set_requires_grad(next(iter(params)), False)
        params.add("extra.gain", torch.ones(2))


class Net(torch.nn.Module):
    """Nested, with tied weights, buffers that are saved and not, a method that computes and one that does not."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 4)
        self.head.weight = self.body[0].weight
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("transient", torch.ones(4), persistent=False)
        self.config = {"width": 4}

    def forward(self, x):
        return self.head(self.body(x)) * self.kept + self.transient

    def generate(self, x):
        return self(x).argmax(-1)

    def width(self):
        return self.config["width"]


PLAIN = ["body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "head.weight", "head.bias"]
BUFFERS = ["kept", "body.2.running_mean", "body.2.running_var", "body.2.num_batches_tracked"]


def made():
    torch.manual_seed(0)
    return Net()


def transformed(plain=None):
    return thunder.jit(plain or made(), transforms=pipeline_of(extended=Extended(None)))


def batch():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["alone", "in a wrapper"])
def wrapped(request):
    """An outer module, the transformed one in it, and the prefix of its names."""
    model = transformed()
    if request.param == "alone":
        return model, model, ""
    return torch.nn.Sequential(torch.nn.Sequential(model, torch.nn.Tanh()), torch.nn.Identity()), model, "0.0."


def test_parameters_and_names(wrapped):
    outer, model, prefix = wrapped
    live = tx.handle(model).parameters
    names = [name for name, _ in outer.named_parameters()]
    assert sorted(names) == sorted(prefix + name for name in (*PLAIN, "extra.gain") if name != "head.weight")
    assert {id(p) for p in outer.parameters()} == {id(p) for p in live.values()}
    assert prefix + "head.weight" in dict(outer.named_parameters(remove_duplicate=False))
    assert {name for name, _ in outer.named_buffers()} == {prefix + name for name in (*BUFFERS, "transient")}
    assert not dict(outer.named_parameters())[prefix + "body.0.weight"].requires_grad


def test_state_dict_round_trip(wrapped):
    outer, _, prefix = wrapped
    state = {name: tensor.clone() for name, tensor in outer.state_dict().items()}
    assert sorted(state) == sorted(prefix + name for name in (*PLAIN, *BUFFERS, "extra.gain"))
    with torch.no_grad():
        for tensor in outer.state_dict().values():
            tensor.zero_()
    assert outer.load_state_dict(state) == ([], [])
    assert all(torch.equal(tensor, state[name]) for name, tensor in outer.state_dict().items())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state, p: state.pop(f"{p}body.0.bias"), "Missing key.*body.0.bias"),
        (lambda state, p: state.update({f"{p}body.0.biass": torch.ones(4)}), "Unexpected key.*body.0.biass"),
        (lambda state, p: state.update({f"{p}head.bias": torch.ones(5)}), "size mismatch for .*head.bias"),
    ],
)
def test_wrong_states_are_refused(wrapped, edit, message):
    outer, _, prefix = wrapped
    state = outer.state_dict()
    edit(state, prefix)
    with pytest.raises(RuntimeError, match=message):
        outer.load_state_dict(state)


def test_loading_past_the_transforms_is_refused(wrapped):
    outer, _, _ = wrapped
    with pytest.raises(RuntimeError, match="would put tensors past the transforms"):
        outer.load_state_dict(outer.state_dict(), assign=True)


def test_an_optimizer_of_the_outer_module_trains_it(wrapped):
    outer, model, _ = wrapped
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    outer(batch()).square().mean().backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"body.0.bias", "body.2.weight", "body.2.bias", "head.bias"}
    outer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_train_and_eval(wrapped):
    outer, model, _ = wrapped
    x = batch()
    training = outer(x)
    assert outer.eval() is outer
    assert not model.training
    evaluated = outer(x)
    assert not torch.allclose(training, evaluated)
    outer.train()
    assert model.training
    assert torch.allclose(outer(x), training)
    assert tx.handle(model).compiled_entries == 2


def test_requires_grad(wrapped):
    outer, model, _ = wrapped
    outer.requires_grad_(False)
    assert not outer(batch()).requires_grad
    outer.requires_grad_(True)
    outer(batch()).square().mean().backward()
    assert model.get_parameter("body.0.weight").grad is not None


def test_moving_and_converting(wrapped):
    outer, model, _ = wrapped
    outer.to("cpu", torch.float32)
    outer.cpu().float()
    expected = outer(batch())
    for convert in (lambda: outer.to(torch.bfloat16), lambda: outer.to("meta"), outer.double):
        with pytest.raises(tx.errors.PipelineError, match=r"Cannot convert 'body.0.weight' of a transformed"):
            convert()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    outer.load_state_dict(outer.state_dict())
    torch.testing.assert_close(outer.train()(batch()), expected)


def test_copies_are_refused(wrapped):
    outer, _, _ = wrapped
    with pytest.raises(tx.errors.PipelineError, match="cannot be copied"):
        copy.deepcopy(outer)


def test_attributes_and_methods_of_the_users_module():
    """What only looks works, and so does what runs the model."""
    plain, x = made(), batch()
    model = transformed(plain)
    assert model.config is plain.config
    assert model.width() == 4
    model.eval()
    assert torch.equal(model.generate(x), model(x).argmax(-1))
    assert torch.equal(Net.generate(model, x), model(x).argmax(-1))
    plain(x)  # Outside of such a method, the user's module stays usable.


def test_an_optimizer_of_the_plain_model_is_adopted():
    plain = made()
    optimizer = torch.optim.AdamW([{"params": plain.body.parameters()}, {"params": [plain.head.bias], "lr": 0.5}])
    model = thunder.jit(plain, transforms=pipeline_of(frozen=Frozen(None)))
    handle = tx.handle(model)
    assert handle.knows(optimizer)
    handle.adopt(optimizer)
    names = {id(p): name for name, p in handle.parameters.items()}
    held = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert held == [["body.0.bias", "body.2.weight", "body.2.bias"], ["head.bias"]]
    model(batch()).square().mean().backward()
    optimizer.step()
    assert {names[id(p)] for p in optimizer.state} == {name for group in held for name in group}


class Frozen(tx.Plugin):
    """Replaces all parameters by copies and freezes the first."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in params:
            params.replace(name, params.tensor(name).detach().clone())
        params.set_requires_grad(next(iter(params)), False)


def test_optimizers_that_cannot_be_adopted():
    plain = made()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    handle = tx.handle(transformed(plain))
    with pytest.raises(tx.errors.PipelineError, match=r"plain model, which lacks 'extra.gain'"):
        handle.adopt(optimizer)
    plain(batch()).sum().backward()
    optimizer.step()
    with pytest.raises(tx.errors.PipelineError, match="has taken steps already"):
        handle.adopt(optimizer)
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    assert not handle.knows(other)
    with pytest.raises(tx.errors.CheckpointError, match="not one of the 6 of the transformed model"):
        handle.adopt(other)
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], plain.parameters(), strict=True))


class Pruning(thunder.Recipe):
    """Prunes the checks of prologues, as Thunder's own recipes do, and fuses nothing."""

    def setup_transforms(self):
        return [PrunePrologueChecks()]


def test_thunder_compile_takes_a_pipeline():
    plain, x = made(), batch()
    pipeline = pipeline_of(extended=Extended(None))
    model = thunder.compile(plain, recipe=Pruning([]), plugins=[pipeline])
    reference = made()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2)
    for training in (True, False, True):  # U16: the pruning would let the code of another mode run.
        model.train(training)
        reference.train(training)
        torch.testing.assert_close(model(x), reference(x), atol=1e-6, rtol=1e-5)
    assert tx.handle(model).compiled_entries == 2
    assert tx.handle(pipeline).pipeline == ("extended",)
