"""What cannot be compiled is an error that says what, where and what to do; Thunder's own is chained."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import TracingError

import thunder  # isort: skip

SHAPES = (
    "Keep shapes fixed: compute all elements and choose with torch.where or a mask, or take that step outside of "
    "forward."
)
DECIDE = "Compute both ways and choose with torch.where, or take the decision outside of forward."
OUTSIDE = "Write it with operators that Thunder knows, or take that step outside of forward."
GRADIENTS = "Take it outside of forward: gradients and what is hooked to them exist after the compiled call only."
OUTPUTS = "Return tensors, numbers, strings, or tuples, lists, dicts and dataclasses of these."
PLAIN = (
    "Run the plain model on the same arguments to see whether the error is its own; if not, write that step otherwise "
    "or take it outside of forward."
)
LINEAR = (
    "Expected w.shape=(2, 2) to have an innermost dimension of length 1, the same length as the innermost dimension of "
    "a.shape=(2, 1)!"
)


class Cache:
    pass


def swallowed(m, x):
    try:
        return x[x > 0]
    except NotImplementedError:
        return x


def suppressed(m, x):
    with contextlib.suppress(Exception):
        return x[x > 0]
    return x


def nested(m, x):
    def again(n):
        return again(n + 1)

    return again(0)


#: what the model does, and what the error says
REFUSED = {
    "nonzero": (
        lambda m, x: x.nonzero(),
        "The model calls nonzero, whose result has a shape that depends on data",
        SHAPES,
    ),
    "unique": (
        lambda m, x: torch.unique(x),
        "The model calls unique, whose result has a shape that depends on data",
        SHAPES,
    ),
    "where": (
        lambda m, x: torch.where(x > 0),
        "The model calls where so that the shape of its result depends on data",
        SHAPES,
    ),
    "mask": (
        lambda m, x: x[x > 0],
        "The model indexes by a mask, whose result has a shape that depends on data",
        SHAPES,
    ),
    "bool": (
        lambda m, x: x if x.sum() > 0 else -x,
        "The model makes a Python bool of a tensor, which is only known when it runs",
        DECIDE,
    ),
    "int": (
        lambda m, x: x[: int(x.sum())],
        "The model makes a Python int of a tensor, which is only known when it runs",
        DECIDE,
    ),
    "sorted": (
        lambda m, x: sorted(x, key=lambda row: row.sum()),
        "The model makes a Python bool of a tensor, which is only known when it runs",
        DECIDE,
    ),
    "max of a number": (
        lambda m, x: x * max(x.sum().item(), 3),
        "The model decides by a number that is only known when it runs",
        DECIDE,
    ),
    "tolist": (
        lambda m, x: x * sum(x[0].tolist()),
        "The model asks for numbers of a tensor by tolist(), which are only known when it runs",
        DECIDE,
    ),
    "range of a number": (
        lambda m, x: [x for _ in range(x[0, 0].long().item())],
        "The model uses a number that is only known when it runs where compiled code needs its value",
        SHAPES,
    ),
    "item of a list": (
        lambda m, x: x * [1, 2, 3][x[0, 0].long().item()],
        "The model uses a number that is only known when it runs where compiled code needs its value",
        SHAPES,
    ),
    "backward": (
        lambda m, x: m.linear(x).sum().backward(),
        "The model uses backward of a tensor, which compiled code does not have",
        GRADIENTS,
    ),
    "data": (
        lambda m, x: m.linear.weight.data,
        "The model uses data of a tensor, which compiled code does not have",
        "Use detach(), or change tensors outside of forward.",
    ),
    "storage": (
        lambda m, x: x.untyped_storage(),
        "The model uses untyped_storage of a tensor, which compiled code does not have",
        OUTSIDE,
    ),
    "torch.compile": (
        lambda m, x: torch.compile(m.linear)(x),
        "The model calls torch.compile",
        "Leave it out: Thunder compiles the whole model.",
    ),
    "operator": (
        lambda m, x: torch.from_numpy(m.array) * x,
        "The model calls torch.from_numpy, which Thunder cannot compile",
        OUTSIDE,
    ),
    "key": (
        lambda m, x: {x: 1}[x],
        "The model puts a tensor into a set or uses it as a key of a dict",
        "Keep tensors in lists or tuples, or under other keys.",
    ),
    "twice": (
        lambda m, x: m.linear(x, input=x),
        "The model gives a function one argument twice, or raises what is no exception",
        "Run the plain model, which says which of the two.",
    ),
    "shapes": (
        lambda m, x: m.linear(x[:, :1]),
        f"Thunder cannot compile what the model does: RuntimeError: {LINEAR}",
        PLAIN,
    ),
    "object": (
        lambda m, x: (x, Cache()),
        f"The model returns a {__name__}.Cache, which compiled code cannot make",
        OUTPUTS,
    ),
    "set": (lambda m, x: (x, {1}), "The model returns a set, which compiled code cannot make", OUTPUTS),
    "generator": (
        lambda m, x: (y for y in (x, x)),
        "The model returns a generator, which compiled code cannot make",
        OUTPUTS,
    ),
}


class Does(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.what = what
        self.array = torch.ones(2).numpy()

    def forward(self, x):
        return self.what(self, x)


def compiled(what):
    return thunder.jit(Does(what), transforms=tx.registry.resolve([]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_named_with_its_line(name):
    what, problem, remedy = REFUSED[name]
    with pytest.raises(TracingError) as caught:
        compiled(what)(torch.ones(2, 2))
    error = caught.value
    # What is wrong with the result is not known before forward is over.
    code = Does.forward.__code__ if remedy is OUTPUTS else what.__code__
    file, line, *_ = error.place.split(":")
    assert (file, int(line)) == (__file__, code.co_firstlineno)
    assert str(error) == f"{problem} ({error.place}). {remedy}"
    assert name == "max of a number" or not isinstance(error.__cause__, TracingError | None)


@pytest.mark.parametrize("what", [swallowed, suppressed])
def test_the_models_own_except_clauses_do_not_catch_it(what):
    with pytest.raises(TracingError, match="The model indexes by a mask"):
        compiled(what)(torch.ones(2, 2))


def test_calls_that_are_nested_too_deeply():
    with pytest.raises(TracingError, match="return again"):
        compiled(nested)(torch.ones(2, 2))


def test_a_line_of_torch_is_told_as_the_line_that_calls_it():
    def what(m, x):
        return nn.functional.linear(x, m.linear.weight[:1, :1])

    with pytest.raises(TracingError) as caught:
        compiled(what)(torch.ones(2, 2))
    assert caught.value.place == (
        f"{__file__}:{what.__code__.co_firstlineno + 1}: return nn.functional.linear(x, m.linear.weight[:1, :1])"
    )


def raises(m, x):
    raise ValueError("mine")


def asserts(m, x):
    raise AssertionError("mine")


def raises_not_implemented(m, x):
    raise NotImplementedError("mine")


def exits(m, x):
    raise KeyboardInterrupt("mine")


def sees_a_proxy(m, x):
    raise RuntimeError(f"mine {x}")


def catches(m, x):
    try:
        return x * m.missing
    except AttributeError:
        return x * 3 if hasattr(m.linear(x), "grad_fn") and not hasattr(x, "missing") else x


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (raises, ValueError),
        (asserts, AssertionError),
        (raises_not_implemented, NotImplementedError),
        (exits, KeyboardInterrupt),
        (sees_a_proxy, RuntimeError),
        (lambda m, x: x * (1 // 0), ZeroDivisionError),
        (lambda m, x: x * {}["mine"], KeyError),
        (lambda m, x: x * int("mine"), ValueError),
        (lambda m, x: m.mine, AttributeError),
        (lambda m, x: x.mine, AttributeError),
        (lambda m, x: m.linear(x, mine=3), TypeError),
        (lambda m, x: x * len(3), TypeError),
    ],
)
def test_the_models_own_errors_pass_as_they_are(what, error):
    with pytest.raises(error) as caught:
        compiled(what)(torch.ones(2, 2))
    assert type(caught.value) is error


def test_what_the_model_catches_itself_goes_its_way():
    x = torch.ones(2, 2)
    torch.testing.assert_close(compiled(catches)(x), x * 3)


def test_an_error_does_not_outlive_its_trace():
    def what(m, x):
        return x[x > 0] if m.training else x * 2

    model, x = compiled(what), torch.ones(2, 2)
    with pytest.raises(TracingError):
        model(x)
    torch.testing.assert_close(model.eval()(x), x * 2)
    with pytest.raises(TracingError):
        model.train()(x)


def test_in_a_function_too():
    model = compiled(lambda m, x: x.nonzero())
    with pytest.raises(TracingError, match="The model calls nonzero"):
        thunder.jit(lambda x: model(x) * 2)(torch.ones(2, 2))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    cache: object


def test_what_a_dataclass_holds():
    with pytest.raises(TracingError, match=rf"The model returns a {__name__}.Cache"):
        compiled(lambda m, x: Output(x.sum(), Cache()))(torch.ones(2, 2))


def test_a_cache_of_keys_and_values():
    """V16."""
    make = pytest.importorskip("transformers").DynamicCache
    name = "transformers.cache_utils.DynamicCache"
    with pytest.raises(TracingError) as caught:
        compiled(lambda m, x: (x, make()))(torch.ones(2, 2))
    assert str(caught.value) == (
        f"The model returns a {name}, which compiled code cannot make ({caught.value.place}). "
        "Pass use_cache=False, and generate with the plain model."
    )
