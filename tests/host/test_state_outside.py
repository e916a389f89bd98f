"""What changes between calls, on the user's module or the transformed one: followed, or an error at the next call."""

import copy
import dataclasses
import enum

import pytest
import torch
import torch.nn.functional as F

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.testing import pipeline_of


class Nothing(tx.Plugin):
    pass


class Copied(tx.Plugin):
    """Gives the compiled model its own tensors, as plugins that distribute do."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in (*params, *params.buffers):
            params.replace(name, params.tensor(name).clone())


class Mode(enum.Enum):
    PLAIN = 1
    SHIFTED = 2


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    flag: object = None


class Net(torch.nn.Module):
    factor = 2.0

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        self.head = torch.nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.scale, self.act, self.extra_scale, self.dtype = 1.0, F.relu, None, torch.float32
        self.weights, self.table = [1.0, 2.0], {"inner": {"x": 1.0}}
        self.config, self.nested, self.mode = Config(), [Config(), Config()], Mode.PLAIN
        self.tensors = [torch.ones(3)]

    def forward(self, x):
        h = self.act(self.head(self.body(x))) * self.scale * self.factor + self.shift
        if self.extra_scale is not None:
            h = h * self.extra_scale
        h = h.to(self.dtype).float()
        for weight in self.weights:
            h = h * weight
        h = h * self.table["inner"]["x"] * self.config.scale * self.nested[1].scale
        if self.config.flag or "flag" in self.table:
            h = h + 1
        if self.mode is Mode.SHIFTED or hasattr(self, "late"):
            h = h - 1
        for tensor in self.tensors:
            h = h * tensor
        return h


def doubled(module, args, output):
    return output * 2


def twice(x):
    return x * 2


FOLLOWED = {
    "number": lambda m: setattr(m, "scale", 3.0),
    "callable": lambda m: setattr(m, "act", torch.sigmoid),
    "None": lambda m: setattr(m, "extra_scale", 2.0),
    "dtype": lambda m: setattr(m, "dtype", torch.bfloat16),
    "item": lambda m: m.weights.__setitem__(0, 5.0),
    "length": lambda m: m.weights.append(2.0),
    "nested item": lambda m: m.table["inner"].update(x=4.0),
    "key": lambda m: m.table.update(flag=1),
    "field": lambda m: setattr(m.config, "scale", 4.0),
    "flag": lambda m: setattr(m.config, "flag", "yes"),
    "equal object, then its field": lambda m: (setattr(m, "config", Config()), setattr(m.config, "scale", 9.0)),
    "object in a list": lambda m: setattr(m.nested[1], "scale", 4.0),
    "enum": lambda m: setattr(m, "mode", Mode.SHIFTED),
    "new attribute": lambda m: setattr(m, "late", 1),
    "tensor in a list": lambda m: m.tensors.__setitem__(0, torch.full((3,), 2.0)),
    "tensors in a list": lambda m: m.tensors.append(torch.full((3,), 0.5)),
    "forward of a part": lambda m: setattr(m.body[1], "forward", twice),
    "hook": lambda m: m.head.register_forward_hook(doubled),
}


def test_attributes_are_followed():
    """One after the other on one model: each compiles at most once, and what has not changed compiles nothing."""
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(2, 3)
    reference = copy.deepcopy(plain)
    model = thunder.jit(plain, transforms=pipeline_of(copied=Copied(None)))
    handle = tx.handle(model)
    torch.testing.assert_close(model(x), reference(x))
    for case, change in FOLLOWED.items():
        change(plain), change(reference)
        torch.testing.assert_close(model(x), reference(x), msg=lambda text, case=case: f"{case}: {text}")
        entries = handle.compiled_entries
        plain.of_no_interest = object()  # The trace has not read it.
        model(x)
        assert handle.compiled_entries == entries, case
    reasons = " ".join(reason for event in handle.events for reason in event.reasons)
    for reason in (
        "module scale: 1.0 -> 3.0",
        "module extra_scale: None -> 2.0",
        "module weights: list of 2 -> list of 3",
    ):
        assert reason in reasons
    plain.scale = reference.scale = 1.0
    entries = handle.compiled_entries
    torch.testing.assert_close(model(x), reference(x))
    assert handle.compiled_entries == entries + 1  # Other attributes are no longer what they were with this scale.


def test_attributes_of_the_class_are_followed():
    class Own(Net):
        factor = 2.0

    plain, x = Own(), torch.randn(2, 3)
    model = thunder.jit(plain, transforms=pipeline_of(nothing=Nothing(None)))
    model(x)
    Own.factor = 7.0
    torch.testing.assert_close(model(x), plain(x))


AGAIN = "Change the plain model before thunder.jit, or transform the changed one with a freshly resolved pipeline."
VALUES = (
    "The plain model's {!r} was given other values after thunder.jit, but the transformed model computes with a tensor "
    "of its own. Load values into the transformed model (model.load_state_dict, "
    "thunder_xform.handle(model).load_state_dict), and copy the plain model before thunder.jit if it is to live on its "
    "own."
)
TRAINED = (
    "requires_grad of the plain model's {0!r} was changed after thunder.jit, but the transformed model has a tensor of "
    "its own. Change it on the transformed model: model.get_parameter({0!r}).requires_grad_(...)."
)


def members(what):
    return f"The {what} after thunder.jit. {AGAIN}"


def overwrite(m):
    with torch.no_grad():
        m.head.weight.fill_(1.0)


REFUSED = {
    "module replaced": (
        lambda m: setattr(m, "head", torch.nn.Linear(3, 3)),
        members("module 'head' of the plain Net was replaced"),
    ),
    "module added": (
        lambda m: m.body.append(torch.nn.Sigmoid()),
        members("module 'body.2' of the plain Net was added"),
    ),
    "module deleted": (lambda m: m.body.__delitem__(1), members("module 'body.1' of the plain Net was removed")),
    "parameter replaced": (
        lambda m: setattr(m.head, "weight", torch.nn.Parameter(torch.ones(3, 3))),
        members("parameter 'head.weight' of the plain Net was replaced"),
    ),
    "parameter dropped": (
        lambda m: setattr(m.head, "bias", None),
        members("parameter 'head.bias' of the plain Net was replaced"),
    ),
    "parameter deleted": (
        lambda m: delattr(m.head, "bias"),
        members("parameter 'head.bias' of the plain Net was removed"),
    ),
    "parameter added": (
        lambda m: m.body.register_parameter("late", torch.nn.Parameter(torch.ones(1))),
        members("parameter 'body.late' of the plain Net was added"),
    ),
    "equal buffer": (
        lambda m: setattr(m, "count", torch.zeros(())),
        members("buffer 'count' of the plain Net was replaced"),
    ),
    "buffer deleted": (lambda m: delattr(m, "shift"), members("buffer 'shift' of the plain Net was removed")),
    "data": (lambda m: setattr(m.head.weight, "data", torch.ones(3, 3)), VALUES.format("head.weight")),
    "data of another shape": (lambda m: setattr(m.head.bias, "data", torch.ones(4)), VALUES.format("head.bias")),
    "values": (overwrite, VALUES.format("head.weight")),
    "loaded": (lambda m: m.load_state_dict(m.state_dict()), VALUES.format("body.0.weight")),
    "data of a buffer": (lambda m: setattr(m.shift, "data", torch.zeros(3)), VALUES.format("shift")),
    "frozen": (lambda m: m.head.weight.requires_grad_(False), TRAINED.format("head.weight")),
}


def called(change, plugin=Copied, first=False):
    """A model that was transformed, called if ``first``, and changed since."""
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(2, 3)
    model = thunder.jit(plain, transforms=pipeline_of(plugin=plugin(None)))
    if first:
        model(x)
    change(plain)
    return plain, model, x


@pytest.mark.parametrize("case", REFUSED)
def test_changes_of_the_plain_model_are_refused(case):
    change, message = REFUSED[case]
    _, model, x = called(change)
    for _ in range(2):
        with pytest.raises(tx.errors.PipelineError) as caught:
            model(x)
        assert str(caught.value) == message


def test_changes_after_a_call_are_refused_as_well():
    _, model, x = called(overwrite, first=True)
    with pytest.raises(tx.errors.PipelineError, match="was given other values"):
        model(x)
    step = thunder.jit(lambda model, x: model(x).sum())
    with pytest.raises(tx.errors.PipelineError, match="was given other values"):
        step(model, x)


def test_what_both_share_is_followed():
    """Where no plugin put other tensors in place, the plain model's are the compiled model's."""

    def change(m):
        overwrite(m)
        m.head.bias.data = torch.full((3,), 2.0)
        m.shift.fill_(3.0)
        m.body[0].weight.requires_grad_(False)

    plain, model, x = called(change, Nothing, first=True)
    out = model(x)
    torch.testing.assert_close(out, plain(x))
    out.sum().backward()
    assert [p.grad is None for p in plain.parameters()] == [True, False, False, False]


def test_trainability_of_the_transformed_model_is_followed():
    plain, model, x = called(lambda m: None, first=True)
    frozen, trained = model.get_parameter("head.weight"), model.get_parameter("head.bias")
    frozen.requires_grad_(False)
    model(x).sum().backward()
    assert (frozen.grad is None, trained.grad is None) == (True, False)
    frozen.requires_grad_(True)
    model(x).sum().backward()
    assert (frozen.grad is None, plain.head.bias.grad is None) == (False, True)


@pytest.mark.parametrize("cache", ["symbolic values", "same input"])
def test_ways_of_caching_that_cannot_be_guarded_are_refused(cache):
    """V38."""
    with pytest.raises(tx.errors.PipelineError) as caught:
        thunder.jit(Net(), cache=cache, transforms=pipeline_of(nothing=Nothing(None)))
    assert str(caught.value) == (
        f"thunder.jit was given cache={cache!r}, under which a transformed model cannot be compiled. "
        f"Leave cache out, or pass cache='constant values' or cache='no caching'."
    )


def test_a_second_compilation_is_refused():
    """V26."""
    model = thunder.jit(Net(), transforms=pipeline_of(nothing=Nothing(None)))
    message = (
        "thunder.jit was given a Net that a pipeline transformed already. Call what the first thunder.jit returned; "
        "for other plugins, transform the plain model with a new pipeline."
    )
    for attempt in (
        lambda: thunder.jit(model)(torch.randn(2, 3)),
        lambda: thunder.jit(model, transforms=pipeline_of(copied=Copied(None))),
        lambda: pipeline_of(copied=Copied(None)).bind(model),
    ):
        with pytest.raises(tx.errors.PipelineError) as caught:
            attempt()
        assert str(caught.value) == message
