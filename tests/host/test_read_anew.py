"""What a forward reads besides its attributes, and text of values: followed when it changes, or refused (V02, V04)."""

import contextlib
import datetime
import functools
import os
import sys
import types

import pytest
import torch

import thunder_xform as tx
from thunder_xform.errors import PipelineError, TracingError
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip


class Base:
    kind = 1.0

    def factor(self, by=1.0):
        return by

    @classmethod
    def of_class(cls):
        return cls.kind

    @property
    def both(self):
        return self.kind * 2


class Held(Base):
    def __init__(self):
        self.number = 1.0


def scaled(x, by=1.0, *, more=1.0, several=(1.0, [1.0])):
    return x * by * more * several[1][0]


class Net(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.part = torch.nn.Dropout(0.0)
        self.function, self.held = function, Held()
        self.ordered, self.large, self.zero, self.whole = {"a": 1.0, "b": 2.0}, list(range(2000)), 0.0, 1
        self.read_only = types.MappingProxyType(self.ordered)
        self.names = types.SimpleNamespace(a=1.0)
        self.partial = functools.partial(scaled, by=2.0)
        self.method = self.held.factor

    def forward(self, x):
        return self.function(self, self.linear(x))


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def as_precise(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    yield
    torch.set_float32_matmul_precision(before)


def assigned(owner, name, value):
    """A change to what all models share, undone afterwards."""

    @contextlib.contextmanager
    def change(model):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            yield

    return change


def held(change):
    @contextlib.contextmanager
    def changed(model):
        change(model)
        yield

    return changed


def other(x, by=1.0, *, more=1.0, several=()):
    return x * 7


def by_held_class(self, x):
    return x * type(self.held).kind * self.held.of_class() * self.held.both


FOLLOWED = {
    "defaults": (lambda s, x: scaled(x), assigned(scaled, "__defaults__", (3.0,))),
    "keyword defaults": (
        lambda s, x: scaled(x),
        assigned(scaled, "__kwdefaults__", {"more": 3.0, "several": (1, [2])}),
    ),
    "a list among the defaults": (
        lambda s, x: scaled(x),
        held(lambda m: scaled.__kwdefaults__["several"][1].__setitem__(0, 5.0)),
    ),
    "defaults of a method": (lambda s, x: x * s.held.factor(), assigned(Base.factor, "__defaults__", (3.0,))),
    "defaults of a held method": (lambda s, x: x * s.method(), assigned(Base.factor, "__defaults__", (3.0,))),
    "code": (lambda s, x: scaled(x), assigned(scaled, "__code__", other.__code__)),
    "a method": (lambda s, x: x * s.held.factor(), assigned(Base, "factor", lambda self: 3.0)),
    "a property": (by_held_class, assigned(Base, "both", property(lambda self: 5.0))),
    "of the class": (by_held_class, assigned(Held, "kind", 3.0)),
    "new in the class": (
        lambda s, x: x * (s.held.late if hasattr(s.held, "late") else 1),
        assigned(Held, "late", 3.0),
    ),
    "arguments of a partial": (lambda s, x: s.partial(x), held(lambda m: m.partial.keywords.update(by=4.0))),
    "names there are": (lambda s, x: x * len(s.__dict__), held(lambda m: setattr(m, "late", 1))),
    "a name in vars": (lambda s, x: x * 2 if "late" in vars(s) else x, held(lambda m: setattr(m, "late", 1))),
    "a name in dir": (lambda s, x: x * 2 if "late" in dir(s) else x, held(lambda m: setattr(m, "late", 1))),
    "vars of an object": (lambda s, x: x * vars(s.names)["a"], held(lambda m: setattr(m.names, "a", 3.0))),
    "order": (
        lambda s, x: x * next(iter(s.ordered.values())),
        held(lambda m: m.ordered.update(a=m.ordered.pop("a"))),
    ),
    "behind a proxy": (lambda s, x: x * s.read_only["a"], held(lambda m: m.ordered.update(a=3.0))),
    "many items": (lambda s, x: x * sum(s.large), held(lambda m: m.large.__setitem__(5, 7))),
    "the zero's sign": (lambda s, x: x / s.zero, held(lambda m: setattr(m, "zero", -0.0))),
    "a number's type": (lambda s, x: x.int() * s.whole, held(lambda m: setattr(m, "whole", 1.0))),
    "a part's mode": (lambda s, x: x * (2 if s.part.training else 1), held(lambda m: m.part.eval())),
    "determinism": (
        lambda s, x: x * 2 if torch.are_deterministic_algorithms_enabled() else x,
        lambda m: deterministic(),
    ),
    "precision": (lambda s, x: x * len(torch.get_float32_matmul_precision()), lambda m: as_precise("medium")),
    "the seed": (lambda s, x: x * torch.initial_seed(), held(lambda m: torch.manual_seed(7))),
    "device": (lambda s, x: x * 2 if torch.get_default_device().type == "meta" else x, lambda m: torch.device("meta")),
    "limit": (lambda s, x: x * sys.getrecursionlimit(), held(lambda m: sys.setrecursionlimit(3001))),
    "kind of a number": (lambda s, x: x * (2 if isinstance(x.sum().item(), float) else 1), held(lambda m: None)),
    "text of what is known": (lambda s, x: x * len(f"{s.whole}-%s" % s.zero), held(lambda m: setattr(m, "whole", 10))),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLLOWED)
def test_followed(case, monkeypatch):
    function, change = FOLLOWED[case]
    monkeypatch.setitem(scaled.__kwdefaults__, "several", (1.0, [1.0]))
    limit = sys.getrecursionlimit()
    plain, x = Net(function), torch.randn(2, 4)
    model = thunder.jit(plain, transforms=pipeline_of(same=tx.Plugin(None)))
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x), equal_nan=True)
    assert tx.handle(model).compiled_entries == 1
    with change(plain):
        torch.testing.assert_close(model(x), plain(x), equal_nan=True)
    sys.setrecursionlimit(limit)


TEXT = "Return them and make the text outside of forward, or print them there."
DRAW = "Draw with PyTorch's operators, or pass it as an argument."
MAKES_TEXT = "The model makes text of values that are only known when it runs"


def reads(what):
    return f"Net {what} while it runs, which compiled code cannot repeat"


def seeded(self, x):
    torch.manual_seed(3)
    return x * torch.rand(())


REFUSED = {
    "str": (lambda s, x: x * len(str(x.sum().item())), MAKES_TEXT, TEXT),
    "repr": (lambda s, x: x * len(repr(x)), MAKES_TEXT, TEXT),
    "f-string": (lambda s, x: x * len(f"{x.sum().item():.30f}"), MAKES_TEXT, TEXT),
    "percent": (lambda s, x: x * len("%s, %s" % (1, x.sum().item())), MAKES_TEXT, TEXT),  # noqa: UP031
    "format": (lambda s, x: x * len("{}".format(x.sum())), MAKES_TEXT, TEXT),  # noqa: UP032
    "hash": (
        lambda s, x: x * hash(x.sum().item()),
        "The model decides by a number that is only known when it runs",
        "Compute both ways and choose with torch.where, or take the decision outside of forward.",
    ),
    "grad": (
        lambda s, x: x if s.linear.weight.grad is None else x * 2,
        "The model reads .grad of a tensor, of which compiled code has none",
        "Pass the gradient as an argument, or take that step outside of forward.",
    ),
    "seed": (seeded, reads("calls torch.manual_seed()"), DRAW),
    "date": (lambda s, x: x * datetime.datetime.now().second, reads("reads datetime.now()"), DRAW),
    "system": (lambda s, x: x * os.urandom(1)[0], reads("reads the system's random numbers"), DRAW),
    "file": (lambda s, x: x * len(open(__file__).name), reads("opens a file"), DRAW),  # noqa: SIM115
}  # fmt: skip

MADE = "The model makes a module with parts or buffers, or changes what it made, while it runs"
INSTEAD = "Make it in __init__, or call the function of torch.nn.functional."
REFUSED["parts"] = (lambda s, x: torch.nn.Sequential(s.part, torch.nn.ReLU())(x), MADE, INSTEAD)
REFUSED["buffers"] = (lambda s, x: torch.nn.NLLLoss()(x, torch.tensor([0, 1])), MADE, INSTEAD)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    function, problem, remedy = REFUSED[case]
    model = thunder.jit(Net(function), transforms=pipeline_of(same=tx.Plugin(None)))
    with pytest.raises((PipelineError, TracingError)) as caught:
        model(torch.randn(2, 4))
    assert caught.value.problem.startswith(f"{problem} ({__file__}:")
    assert caught.value.remedy == remedy


def test_a_module_without_state_may_be_made():
    function = lambda s, x: torch.nn.Softmax(-1)(torch.nn.ReLU()(x))  # noqa: E731
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))  # which changes how modules are made
    plain, x = Net(function), torch.randn(2, 4)
    torch.testing.assert_close(thunder.jit(plain, transforms=pipeline_of(same=tx.Plugin(None)))(x), plain(x))


def test_the_first_trace_of_a_function_is_judged_as_others_are():
    """A pipeline that finds its model in the trace of a function: dtypes, types, gradients are PyTorch's there, too."""

    def asking(model, x):
        h = model(x)
        known = x.dtype is torch.float32 and type(x) is torch.Tensor and h.requires_grad and not x.t().is_contiguous()
        return h.mul_(2 if known else 1).exp_()

    plain, other, x = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.randn(2, 4)
    one = thunder.jit(lambda x: asking(plain, x), transforms=pipeline_of(same=tx.Plugin(None)))
    two = [*pipeline_of(a=tx.Plugin(None)).bind(plain), *pipeline_of(b=tx.Plugin(None)).bind(other)]
    for compiled, eager in (
        (one, lambda x: asking(plain, x)),
        (thunder.jit(lambda x: asking(plain, other(x)), transforms=two), lambda x: asking(plain, other(x))),
    ):
        torch.testing.assert_close(compiled(x), eager(x))
    refused = thunder.jit(lambda x: plain(x) * len(str(x.sum())), transforms=pipeline_of(same=tx.Plugin(None)))
    with pytest.raises(TracingError, match=MAKES_TEXT):
        refused(x)
