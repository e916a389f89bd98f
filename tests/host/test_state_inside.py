"""State that a forward changes: every call changes it as eager PyTorch does, or the first one says where it cannot."""

import collections
import copy
import re
from pathlib import Path

import pytest
import torch

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.testing import pipeline_of


class Nothing(tx.Plugin):
    pass


class Copied(tx.Plugin):
    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in (*params, *params.buffers):
            params.replace(name, params.tensor(name).clone())


PIPELINES = {
    "nothing": lambda: pipeline_of(nothing=Nothing(None)),
    "copied": lambda: pipeline_of(copied=Copied(None)),
    "lora": lambda: tx.registry.resolve(["lora"], options={"lora": {"r": 2}}),
    "quant": lambda: tx.registry.resolve(["quant"]),
    "aten": lambda: tx.registry.resolve(["aten"]),
}


class Config:
    seen = 0


class Counting(torch.nn.Module):
    """V01: buffers assigned anew. V02: plain attributes."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("kept", torch.zeros(4), persistent=False)
        self.config = Config()
        self.last = None
        self.width = 0

    def forward(self, x):
        h = self.linear(x)
        self.n = self.n + 1
        name = "mean"
        setattr(self, name, 0.5 * self.mean + 0.5 * h.detach().mean(0))
        with torch.no_grad():
            self.kept = self.kept + h.mean(0)
        self.width = x.shape[0]
        if self.training:
            self.config.seen = self.width
        self.last = {"out": h, "note": "seen"}
        return h * self.n + self.mean


class Twice(Counting):
    """The same on the root and on a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = Counting()

    def forward(self, x):
        return super().forward(self.inner(x))


def states(module):
    return {k: v.clone() for k, v in module.state_dict().items() if not k.endswith((".lora_A", ".lora_B"))}


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_assignments_are_seen_by_the_next_call(make):
    torch.manual_seed(0)
    plain = Twice()
    model = thunder.jit(plain, transforms=make())
    # What the pipeline computes without anything compiled: merged or unpacked weights in the plain model.
    full = tx.handle(model).state_dict()
    reference = copy.deepcopy(plain)
    reference.load_state_dict(full)
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    for step in range(4):
        model.train(step < 3), reference.train(step < 3)
        x = torch.randn(3, 4)
        out, expected = model(x), reference(x)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        out.sum().backward(), expected.sum().backward()  # No step holds on to the graph of the one before.
    assert tx.handle(model).compiled_entries <= 4
    theirs = dict(model.named_buffers())
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(theirs[name], buffer, atol=1e-5, rtol=1e-5)
        assert not theirs[name].requires_grad
    assert tx.handle(model).state_dict().keys() == reference.state_dict().keys()
    assert (model.inner.width, model.width, model.config.seen, plain.inner.config.seen) == (3, 3, 3, 3)
    assert model.last["note"] == "seen"
    assert model.last["out"].requires_grad
    torch.testing.assert_close(model.last["out"], reference.last["out"], atol=1e-5, rtol=1e-5)
    for name, buffer in plain.named_buffers():  # The user's module keeps its own.
        assert torch.equal(buffer, before[name])


class Branches(torch.nn.Module):
    """Assignments that decide what the next call computes."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("cache", None)
        self.register_buffer("grown", torch.zeros(0, 2))
        self.step = 0
        self.ready = False
        self.previous = None
        self.history = ()

    def forward(self, x):
        h = self.linear(x)
        self.cache = h.detach() if self.cache is None else self.cache + h.detach()
        self.grown = torch.cat([self.grown, x])
        self.step += 1
        if not self.ready:
            self.ready = True
            h = h * 2
        if self.previous is not None:
            h = h + self.previous
        self.previous = x * 2
        self.history = (*self.history, self.step)
        return h * self.step + self.cache + self.grown.sum() + len(self.history)


@pytest.mark.parametrize("inner", [False, True])
def test_assignments_that_change_the_course(inner):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(Branches()) if inner else Branches()
    reference = copy.deepcopy(plain)
    model = thunder.jit(plain, transforms=pipeline_of(copied=Copied(None)))
    for _ in range(3):
        x = torch.randn(1, 2)
        torch.testing.assert_close(model(x), reference(x))
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value)
    assert model.get_buffer("0.grown" if inner else "grown").shape == (3, 2)


def appends(self, x):
    self.items.append(x.sum())


def appends_after_use(self, x):
    torch.stack(self.tensors)
    self.tensors.append(x)


def extends(self, x):
    self.items += [1]


def sets_an_item(self, x):
    self.table["k"] = x


def updates(self, x):
    self.table["nested"].update(k=1)


def discards(self, x):
    self.names.discard("a")


def pushes(self, x):
    self.queue.append(1)


def deletes(self, x):
    del self.flag


def writes_past(self, x):
    self.__dict__["flag"] = False


def registers(self, x):
    self.register_buffer("fresh", x)


def makes_a_parameter(self, x):
    self.linear.weight = torch.nn.Parameter(self.linear.weight * 2)


def drops_a_parameter(self, x):
    self.linear.bias = None


def replaces_a_module(self, x):
    self.linear = self.other


def assigns_data(self, x):
    self.linear.weight.data = x


def counts_on_the_class(self, x):
    type(self).count = 1


def counts_globally(self, x):
    COUNTED[0] += 1


def assigns_a_global(self, x):
    global counted
    counted = 1


COUNTED = [0]
counted = 0
REFUSED = {
    appends: "changes 'inner.items', a list,",
    appends_after_use: "changes 'inner.tensors', a list,",
    extends: "changes 'inner.items', a list,",
    sets_an_item: "changes 'inner.table', a dict,",
    updates: "changes \"inner.table['nested']\", a dict,",
    discards: "changes 'inner.names', a set,",
    pushes: "changes 'inner.queue', a deque,",
    deletes: "deletes 'inner.flag'",
    writes_past: "writes 'inner.flag' past assignment",
    registers: "writes 'inner.fresh' past assignment",
    makes_a_parameter: "makes a parameter",
    drops_a_parameter: "assigns the parameter 'inner.linear.bias'",
    replaces_a_module: "assigns the module 'inner.linear'",
    assigns_data: "assigns .data of a tensor",
    counts_on_the_class: "assigns 'count' of the class Refused",
    counts_globally: "changes a list that is not its own",
    assigns_a_global: "assigns the global 'counted'",
}


class Refused(torch.nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.items, self.table, self.names = [], {"nested": {}}, {"a"}
        self.tensors = [torch.zeros(2)]
        self.queue, self.flag = collections.deque(), True
        self.change = change

    def forward(self, x):
        y = self.linear(x)
        self.change(self, x)
        return y


class Outer(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_cannot_be_repeated_is_refused_by_name_and_line(change):
    inner = Refused(change)
    model = thunder.jit(Outer(inner), transforms=pipeline_of(nothing=Nothing(None)))
    with pytest.raises(tx.errors.PipelineError) as caught:
        model(torch.randn(2, 2))
    line = change.__code__.co_firstlineno + (2 if change in (assigns_a_global, appends_after_use) else 1)
    code = Path(__file__).read_text().splitlines()[line - 1].strip()
    assert str(caught.value) == (
        f"Outer {REFUSED[change]} while it runs, which compiled code cannot repeat ({__file__}:{line}: {code}). Keep "
        f"it in a buffer that forward assigns, return it, or change it outside of forward."
    )
    # Nothing has happened to the user's objects.
    assert (inner.items, inner.table, inner.names, list(inner.queue)) == ([], {"nested": {}}, {"a"}, [])
    assert (inner.flag, COUNTED, counted, hasattr(Refused, "count")) == (True, [0], 0, False)


class Carrying(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        h = self.linear(x)
        self.mean = self.mean + h.mean(0)
        return h


def test_a_buffer_takes_no_gradient_along():
    model = thunder.jit(Carrying(), transforms=pipeline_of(nothing=Nothing(None)))
    message = (
        r"The buffer 'mean' is assigned a tensor that carries a gradient \(.*test_state_inside.py:\d+: self.mean = "
        r"self.mean \+ h.mean\(0\)\). Assign a detached one, or compute it under torch.no_grad\(\)."
    )
    with pytest.raises(tx.errors.PipelineError, match=f"^{message}$"):
        model(torch.ones(1, 2))
    with torch.no_grad():  # Nothing carries one here.
        h = model(torch.ones(1, 2))
    assert torch.equal(model.get_buffer("mean"), h[0])


class Shared(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.other = torch.nn.Module()
        self.other.register_buffer("n", self.n)

    def forward(self, x):
        self.n = self.n + 1
        return x * self.n


def test_a_shared_buffer_is_not_assigned():
    model = thunder.jit(Shared(), transforms=pipeline_of(nothing=Nothing(None)))
    expected = "Shared assigns the buffer 'n', which is 'other.n' as well, while it runs"
    with pytest.raises(tx.errors.PipelineError, match=f"^{re.escape(expected)}"):
        model(torch.ones(2))


def test_lists_and_dictionaries_of_the_forward_itself():
    """What a forward makes, it may change."""

    class Building(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sizes = [1, 2]

        def forward(self, x, **more):
            parts = list(self.sizes)
            parts.append(3)
            table = dict(more)
            table["x"] = x
            more.setdefault("y", 1)
            more["z"] = x
            return sum(parts) * table["x"] * more["y"] + more["z"]

    model = thunder.jit(Building(), transforms=pipeline_of(nothing=Nothing(None)))
    given = {"y": 2}
    torch.testing.assert_close(model(torch.ones(2), **given), torch.full((2,), 13.0))
    assert given == {"y": 2}
