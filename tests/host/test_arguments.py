"""V04: how each kind of argument is guarded. Another value gives another entry, the same value the same entry."""

import collections
import copy
import dataclasses
import enum
import functools
import types

import pytest
import torch

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.testing import pipeline_of


class Noop(tx.Plugin):
    pass


class Kind(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass
class Data:
    a: float


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


class AlwaysEqual(Data):
    def __eq__(self, other):
        return True


Pair = collections.namedtuple("Pair", "a b")


class Model(torch.nn.Module):
    def __init__(self, use):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.use = use

    def forward(self, x, *args, **kwargs):
        return self.use(self.linear(x), *args, **kwargs)


def scaled(factor):
    return lambda h: h * factor


#: kind of argument: (what the model does with it, calls whose results differ or whose guards do)
TABLE = {
    "torch.dtype": (lambda h, d: h.to(d), [(torch.float64,), (torch.bfloat16,)]),
    "torch.layout": (lambda h, d: h * (2 if d is torch.strided else 3), [(torch.strided,), (torch.sparse_coo,)]),
    "builtin": (lambda h, f: f(h), [(torch.sin,), (torch.cos,)]),
    "function": (lambda h, f: f(h), [(scaled(2),), (scaled(3),)]),
    "partial": (
        lambda h, f: f(h),
        [(functools.partial(lambda h, k: h * k, k=k),) for k in (2, 3)],
    ),
    "enum": (lambda h, e: h * (2 if e is Kind.A else 3), [(Kind.A,), (Kind.B,)]),
    "dataclass": (lambda h, d: h * d.a, [(Data(2.0),), (Data(3.0),)]),
    "slots": (lambda h, d: h * d.a, [(Slotted(2.0),), (Slotted(3.0),)]),
    "object equal to all": (lambda h, d: h * d.a, [(AlwaysEqual(2.0),), (AlwaysEqual(3.0),)]),
    "namespace": (lambda h, d: h * d.a, [(types.SimpleNamespace(a=2),), (types.SimpleNamespace(a=3),)]),
    "namedtuple": (lambda h, d: h * (2 if hasattr(d, "a") else 3), [(Pair(2.0, 1),), ((2.0, 1),)]),
    "None": (lambda h, d=5: h if d is None else h * d, [(), (None,), (5,)]),
    "bool and int": (lambda h, d: h * (2 if d is True else 3), [(True,), (1,), (1.0,)]),
    "sign of zero": (lambda h, d: h * (2 if str(d) == "0.0" else 3), [(0.0,), (-0.0,)]),
    "range": (lambda h, d: h * sum(i for i in d), [(range(3),), (range(4),)]),
    "set": (lambda h, d: h * (2 if 5 in d else 3), [({1, 5},), ({1, 2},)]),
    "list": (lambda h, d: h * sum(d), [([1, 2],), ([1, 3],), ([1, 3, 4],), ([],)]),
    "dict": (lambda h, d: h * d.get("b", 7), [({"a": 2},), ({"a": 2, "b": 1},)]),
    "keyword": (lambda h, b=1, c=1: h * b, [{"b": 2}, {"b": 3}, {"c": 2}]),
    "tensor or none": (lambda h, t: h * (2 if t is None else 3), [(torch.ones(2),), (None,)]),
    "module": (lambda h, m: m(h), [(torch.nn.ReLU(),), (torch.nn.Tanh(),)]),
}


@pytest.mark.parametrize("kind", TABLE)
def test_another_argument_is_another_entry(kind):
    use, calls = TABLE[kind]
    model = Model(use)
    plain, compiled = copy.deepcopy(model), thunder.jit(model, transforms=pipeline_of(noop=Noop(None)))
    x = torch.randn(2, 3)
    for count, call in enumerate(calls, 1):
        args, kwargs = ((), call) if isinstance(call, dict) else (call, {})
        for _ in range(2):
            torch.testing.assert_close(compiled(x, *args, **kwargs), plain(x, *args, **kwargs))
        assert thunder.cache_misses(compiled) == count
