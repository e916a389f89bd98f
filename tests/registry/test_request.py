"""The forms of a request, option names and values (U23), and the text form."""

import math
import sys
import types
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_xform.errors import (
    DuplicateRequestError,
    OptionError,
    RequestSyntaxError,
    UnknownNameError,
    UnknownOptionError,
)
from thunder_xform.registry import Lock

OPTIONS = '''
"""Options."""
from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal

Width = typing.Annotated[int, ">= 1"]

@dataclass(frozen=True)
class Options:
    rank: int = 8
    """The rank of
    the adapters."""
    #: Scales the update
    #: by alpha / rank.
    alpha: float = 16.0
    names: tuple[str, ...] = ()
    _: KW_ONLY
    mode: Literal["full", "fast"] = "full"
    group: object = None
    limits: Mapping[str, int] = field(default_factory=dict)
    shape: tuple[int, int] | None = None
    drop: "bool | float" = False
    scale: typing.Optional[float] = field(default=None)
    width: Width = 4
    share: typing.Annotated[float, ">= 0, < 1", "of all"] = 0.5
    widths: Mapping[str, Width] | Width | None = None
    dtype: SomeUnknownType = None
    count: ClassVar[int] = 0
    derived: int = field(init=False, default=0)

@dataclass
class Derived(Options):
    more: int = 0
'''


@pytest.fixture
def lora(registry, tmp_path, monkeypatch):
    """A registry whose `lora` has the options above, in a module that must not be imported."""
    package = tmp_path / "statically_read"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "options.py").write_text(OPTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return registry(lora={"options": "statically_read.options:Options"}, fsdp={"stage": "distribute"})


def options(resolution, name="lora"):
    return next(step.options for step in resolution.steps if step.name == name)


@pytest.mark.parametrize("request_", [[], ()], ids=repr)
def test_an_empty_request_is_an_empty_pipeline(lora, request_):
    resolution = lora.plan(request_)
    assert (resolution.order, resolution.text) == ((), "")


@pytest.mark.parametrize("request_", ["", " \n", [""], ["lora", " "]], ids=repr)
def test_v22_an_empty_text_is_no_request(lora, request_):
    with pytest.raises(RequestSyntaxError) as caught:
        lora.plan(request_)
    assert str(caught.value) == (
        "the request is empty. Name a plugin; an empty list stands for a pipeline without any."
    )


FORMS = [
    ["lora", "fsdp"],
    ("fsdp", "lora"),
    "lora + fsdp",
    "  fsdp\n+ lora() ",
    ["lora", ("fsdp", {})],
    [("lora", {}), "fsdp"],
    ["lora + fsdp"],
]


@pytest.mark.parametrize("request_", FORMS, ids=repr)
def test_forms_without_options(lora, request_):
    assert lora.plan(request_).text == "lora + fsdp"


@pytest.mark.parametrize(
    ("request_", "keyword"),
    [
        (("lora", {"rank": 4, "names": ["a", "b"]}), {}),
        ([("lora", {"rank": 4, "names": ["a", "b"]})], {}),
        ("lora(rank=4, names=('a', 'b'))", {}),
        ("lora(names=['a', 'b'], rank=4)", {}),
        ("lora(rank=4)", {"lora": {"names": ["a", "b"]}}),
        ("lora(rank=4)", {"lora": {"names": ["a", "b"], "rank": 4}}),
        ("lora", {"lora": {"names": ("a", "b"), "rank": 4}}),
    ],
)
def test_forms_with_options(lora, request_, keyword):
    resolution = lora.plan(request_, options=keyword)
    assert options(resolution) == {"names": ("a", "b"), "rank": 4}
    assert resolution.text == "lora(names=('a', 'b'), rank=4)"


@dataclass(frozen=True)
class Options:
    rank: int = 8
    names: tuple = field(default_factory=tuple)


class Plugin:
    def __init__(self, options=None):
        self.options = options


@pytest.fixture
def loaded(registry, monkeypatch):
    """A registry whose `lora` is made of the two classes above."""
    module = types.ModuleType("already_imported")
    module.Options, module.Plugin = Options, Plugin
    monkeypatch.setitem(sys.modules, "already_imported", module)
    lora = {"plugin": "already_imported:Plugin", "options": "already_imported:Options"}
    big = {"stage": None, "requires": ("lora",), "defaults": {"lora": {"rank": 2}}}
    return registry(lora=lora, big=big)


def test_options_instance(loaded):
    assert options(loaded.plan(Options(rank=4))) == {"rank": 4}
    assert loaded.plan([Options(rank=4)]).lock == loaded.plan("lora(rank=4)").lock
    assert options(loaded.plan(Options())) == {}


def test_options_instance_overrides_a_bundle_even_with_the_default(loaded):
    assert options(loaded.plan("big")) == {"rank": 2}
    assert options(loaded.plan(["big", Options(rank=8)])) == {"rank": 8}


def test_plugin_instance(loaded):
    plugin = Plugin(Options(rank=4))
    step = loaded.plan([plugin]).steps[0]
    assert step.instance is plugin
    assert step.options == {"rank": 4}
    assert loaded.plan(Plugin()).steps[0].options == {}
    with pytest.raises(DuplicateRequestError) as caught:
        loaded.plan(plugin, options={"lora": {"rank": 4}})
    assert str(caught.value) == (
        "the option 'rank' of 'lora' is set by the plugin instance and 4 in options=. Give it in one place."
    )


class Stranger:
    pass


@pytest.mark.parametrize(
    "item", [None, 3, {"lora": {}}, ["lora"], Plugin, Stranger()], ids=lambda item: type(item).__name__
)
def test_other_items_are_refused(loaded, item):
    with pytest.raises(RequestSyntaxError) as caught:
        loaded.plan(["lora", item])
    if isinstance(item, Stranger):
        assert "Stranger belongs to no installed plugin. Name its class as" in str(caught.value)
    else:
        assert str(caught.value) == (
            f"a request item may not be {item!r}. "
            "Give a name, a pair (name, options), an options instance, or a plugin instance."
        )


@pytest.mark.parametrize("request_", [["lora", "lora"], "lora + lora", ["lora", ("lora", {"rank": 3})]])
def test_u18_the_same_plugin_twice(lora, request_):
    with pytest.raises(DuplicateRequestError) as caught:
        lora.plan(request_)
    assert str(caught.value) == (
        "'lora' is requested twice. Name each plugin once; all its options go into that one place."
    )


def test_one_option_with_two_values(lora):
    with pytest.raises(DuplicateRequestError) as caught:
        lora.plan(("lora", {"rank": 4}), options={"lora": {"rank": 8}})
    assert str(caught.value) == (
        "the option 'rank' of 'lora' is 4 in the request and 8 in options=. Give it in one place."
    )
    with pytest.raises(DuplicateRequestError):
        lora.plan(("lora", {"drop": True}), options={"lora": {"drop": 1}})


def test_malformed_keywords(lora):
    with pytest.raises(RequestSyntaxError) as caught:
        lora.plan("lora", options={"lora": 8})
    assert str(caught.value) == ("options= gives 'lora' 8. Give it a mapping, such as {'lora': {'r': 8}}.")
    for edge in ("lora:fsdp", ("lora",), ("lora", 3)):
        with pytest.raises(RequestSyntaxError) as caught:
            lora.plan("lora", edges=[edge])
        assert str(caught.value) == (
            f"edges= contains {edge!r}. Each edge is a pair (first, then) of names or capabilities."
        )


def test_options_for_an_absent_plugin(lora):
    with pytest.raises(UnknownNameError) as caught:
        lora.plan("fsdp", options={"fsdpp": {}})
    assert str(caught.value) == (
        "options are given for 'fsdpp', which is not in the pipeline. Did you mean 'fsdp'? It consists of fsdp."
    )


@pytest.mark.parametrize("name", ["rnk", "Rank", "count", "derived", "_", "", "not an identifier", 3])
def test_u23_unknown_option(lora, name):
    with pytest.raises(UnknownOptionError) as caught:
        lora.plan([("lora", {name: 4})])
    hint = " Did you mean 'rank'?" if name in ("rnk", "Rank") else ""
    assert str(caught.value) == (
        f"'lora' [dist-lora 1.0] has no option {str(name)!r}.{hint} "
        "Its options are rank, alpha, names, mode, group, limits, shape, drop, scale, width, share, widths and "
        "dtype."
    )


def test_u23_option_of_a_plugin_that_takes_none(lora):
    with pytest.raises(UnknownOptionError) as caught:
        lora.plan("fsdp(zero=3)")
    assert str(caught.value) == "'fsdp' [dist-fsdp 1.0] has no option 'zero'. It takes no options."


def test_options_that_cannot_be_read_statically_wait_for_loading(registry, lora):
    r = registry(lora={"options": "statically_read.options:Derived"})
    assert options(r.plan("lora(anything=1)")) == {"anything": 1}
    with pytest.raises(UnknownOptionError):
        r.plan(("lora", {"no identifier": 1}))


BAD_VALUES = {
    "text for int": ("rank", "8", "int"),
    "bool for int": ("rank", True, "int"),
    "float for int": ("rank", 8.0, "int"),
    "text for float": ("alpha", "8", "float"),
    "text for a tuple": ("names", "q_proj", "tuple[str, ...]"),
    "number in a tuple": ("names", ("a", 1), "tuple[str, ...]"),
    "no member": ("mode", "slow", "'full' or 'fast'"),
    "list for a mapping": ("limits", [1], "Mapping[str, int]"),
    "text in a mapping": ("limits", {"a": "b"}, "Mapping[str, int]"),
    "too short": ("shape", (1,), "tuple[int, int] or None"),
    "text for a union": ("drop", "x", "bool or float"),
    "text for an optional": ("scale", "x", "float or None"),
    "V22: below": ("width", 0, "int >= 1"),
    "V22: negative": ("width", -1, "int >= 1"),
    "V22: not the type": ("width", True, "int >= 1"),
    "V22: the open end": ("share", 1, "float >= 0 and < 1 of all"),
    "V22: no number": ("share", math.nan, "float >= 0 and < 1 of all"),
    "V22: inside": ("widths", {"a": 1, "b": 0}, "Mapping[str, int >= 1] or int >= 1 or None"),
}


@pytest.mark.parametrize(("name", "value", "wanted"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values(lora, name, value, wanted):
    with pytest.raises(OptionError) as caught:
        lora.plan([("lora", {name: value})])
    shown = tuple(value) if isinstance(value, list) else value
    assert str(caught.value) == (
        f"the option {name!r} of 'lora' [dist-lora 1.0] is {shown!r}, which it does not take. Give {wanted}."
    )


def test_a_value_that_is_nearly_one_of_the_literals(lora):
    with pytest.raises(OptionError, match=r"does not take\. Did you mean 'fast'\? Give 'full' or 'fast'\."):
        lora.plan("lora(mode='fastt')")


GOOD_VALUES = {
    "width": [1],
    "share": [0, 0.99],
    "widths": [None, 3, {"a": 1}],
    "rank": [0, -3],
    "alpha": [0.5, 16],
    "names": [(), ["a"], ("a", "b")],
    "mode": ["fast"],
    "group": [None, object(), "anything"],
    "limits": [{}, {"a": 1}],
    "shape": [None, (1, 2), [3, 4]],
    "drop": [True, 0.5, 1],
    "scale": [None, 1, 0.5],
    "dtype": [None, "bf16", 3],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in GOOD_VALUES.items() for v in vs])
def test_good_values(lora, name, value):
    stored = options(lora.plan([("lora", {name: value})]))[name]
    assert stored == (tuple(value) if isinstance(value, list) else value)


def test_equal_values_in_other_spelling_have_one_lock(lora):
    digests = {lora.plan(text).lock.digest for text in ("lora(alpha=16)", "lora(alpha=16.0)", "lora(alpha=1.6e1)")}
    assert len(digests) == 1
    assert lora.plan("lora(rank=1)").lock.digest != lora.plan("lora(rank=2)").lock.digest
    assert lora.plan("lora(drop=True)").lock.digest != lora.plan("lora(drop=1)").lock.digest


BAD_TEXT = {
    "lora(rank=": (10, "is not understood at column 11: the end."),
    "lora fsdp": (0, "is not understood at column 1: 'lora fsdp'."),
    "lora - fsdp": (0, "is not a plugin name at column 1: 'lora - fsdp'."),
    "lora + 3": (7, "is not a plugin name at column 8: '3'."),
    "lora(8)": (5, "gives 'lora' an option without its name at column 6: '8)'."),
    "lora(rank=size)": (10, "gives 'rank' no literal at column 11: 'size)'."),
    "lora(rank=__import__('os'))": (10, "gives 'rank' no literal at column 11: \"__import__('os'))\"."),
    "lora(**{})": (5, "uses '**' at column 6: '**{})'."),
    "lora(rank=1, rank=2)": (13, "gives 'lora' the option 'rank' twice at column 14: 'rank=2)'."),
    "lora(names={'a'})": (11, "gives 'names' a set at column 12: \"{'a'})\"."),
    "lora(names=('é', b'x'))": (11, "gives 'names' a tuple at column 12: \"('é', b'x'))\"."),
    "lora(names='éé') + 3": (19, "is not a plugin name at column 20: '3'."),
    "lora.x": (0, "is not a plugin name at column 1: 'lora.x'."),
    "()": (0, "is not a plugin name at column 1: '()'."),
    "thunder-xform-lora": (0, "is not a plugin name at column 1: 'thunder-xform-lora'."),
}


@pytest.mark.parametrize(("text", "expected"), BAD_TEXT.items())
def test_bad_text(lora, text, expected):
    column, message = expected
    with pytest.raises(RequestSyntaxError) as caught:
        lora.plan(text)
    assert str(caught.value) == (
        f"the request {text!r} {message} Write it as 'lora(r=8) + fsdp(zero=3)', with literals as values."
    )
    assert caught.value.position == column


def test_objects_show_in_the_text_but_cannot_be_read_back(lora):
    text = lora.plan("lora", options={"lora": {"group": Stranger(), "rank": 2}}).text
    assert text == f"lora(group=<{__name__}.Stranger>, rank=2)"
    with pytest.raises(RequestSyntaxError) as caught:
        lora.plan(text)
    assert str(caught.value) == (
        f"the request contains <{__name__}.Stranger>, which stands for an object that text cannot express. "
        "Pass that object through options={...}."
    )


text = st.text("ab'\"\\<>(){}=+,\n\x00é\u2028\U0001f600", max_size=6)
keys = text | st.integers() | st.none() | st.booleans()
literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["alpha", "beta", "gamma"]), literals), st.booleans())
def test_text_and_lock_round_trip(registry, values, with_fsdp):
    r = registry(lora={"options": "no_such_module:Options"}, fsdp={"stage": "distribute"})
    first = r.plan([("lora", values), *(["fsdp"] if with_fsdp else [])])
    again = r.plan(first.text)
    assert options(again) == options(first)
    assert again.text == first.text
    assert again.lock.digest == first.lock.digest
    read = Lock.from_json(first.lock.to_json())
    assert read.digest == first.lock.digest
    assert read.diff(first.lock) == ()


@pytest.mark.parametrize("value", [math.inf, -math.inf, (math.inf,)])
def test_infinities_round_trip(lora, value):
    first = lora.plan([("lora", {"group": value})])
    assert options(lora.plan(first.text)) == {"group": value}
    assert lora.plan(first.text).lock.digest == first.lock.digest
