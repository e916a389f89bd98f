"""Options that choose modules by name, as any plugin may have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.errors import OptionError
from thunder_xform.testing import pipeline_of

NAMES = ["blocks.0.q_proj", "blocks.0.k_proj", "blocks.10.q_proj", "head", ""]


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        (["q_proj"], [0, 2]),
        (["0.q_proj"], [0]),  # A suffix ends between dots: not in "10".
        (("head", "blocks.0.k_proj"), [1, 3]),
        (["proj", "Head", "."], []),
        ([""], [4]),
        ([], []),
        (r"blocks\.\d+\.q_proj", [0, 2]),
        ("q_proj", []),  # An expression is for whole names.
        (".*", [0, 1, 2, 3, 4]),
    ],
)
def test_matches(pattern, chosen):
    assert [NAMES[i] for i in chosen] == [name for name in NAMES if tx.patterns.matches(pattern, name)]


@given(st.lists(st.sampled_from(NAMES)), st.lists(st.sampled_from(NAMES)), st.sampled_from(NAMES))
def test_a_list_matches_what_one_of_its_names_does(some, others, name):
    matches = tx.patterns.matches
    assert matches([*some, *others], name) == (matches(some, name) or matches(others, name))
    assert matches([name], name)


def test_normalized():
    assert tx.patterns.normalized("layers", ["a", "b"]) == ("a", "b")
    assert tx.patterns.normalized("layers", r"a|b") == r"a|b"
    with pytest.raises(ValueError, match=r"`layers` is '\(a', which as text is a regular expression, but not a valid"):
        tx.patterns.normalized("layers", "(a")
    with pytest.raises(ValueError, match=r"`layers` is \['a', 1\], but it is a regular expression or a list of names"):
        tx.patterns.normalized("layers", ["a", 1])


class Choosing(tx.Plugin):
    @tx.hookimpl
    def update_model_state(self, ctx):
        tx.patterns.check("layers", self.options, ["every", "inner.up", "inner.down"], ctx)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (["up", "dwon"], "`layers` 'dwon' matches no module of Net. Closest names: 'down'"),
        ("inner.pu", r"`layers` 'inner\.pu' matches no module of Net. Closest names: 'inner.up'"),
        (["zzz"], "Closest names: 'every', 'up', 'down', 'inner.up', 'inner.down'"),
        (["up"], None),
        ("inner[.].*", None),
        ((), None),
    ],
)
def test_check(pattern, problem):
    pipeline = pipeline_of(choosing=Choosing(pattern))
    if problem is None:
        thunder.jit(Net(), transforms=pipeline)
        return
    with pytest.raises(OptionError, match=problem) as caught:
        thunder.jit(Net(), transforms=pipeline)
    error = caught.value
    assert (error.plugin, error.distribution, error.option) == ("choosing", "thunder-xform-choosing", "layers")
    assert error.value == repr(pattern[-1] if isinstance(pattern, list) else pattern)
