"""The lock: what it holds, what changes it, and what does not."""

import enum
import json
import platform
import shutil
import sys
import types
from importlib import metadata

import pytest

from thunder_xform.errors import ResolutionError
from thunder_xform.registry import Lock


class Color(enum.Enum):
    RED = 1


class Named:
    """A constant that its module offers under its repr, as torch's dtypes are."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"constants.{self.name}"


@pytest.fixture
def planned(registry):
    def plan(**options):
        r = registry(lora={"options": "no_such_module:Options"})
        return r.plan(("lora", options)).lock

    return plan


def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def test_canonical_json(planned):
    lock = planned(rank=8)
    assert json.loads(lock.to_json()) == {
        "schema": 1,
        "host": {
            "lightning-thunder": version("lightning-thunder"),
            "python": ".".join(platform.python_version_tuple()[:2]),
            "thunder-xform": version("thunder-xform"),
            "torch": version("torch"),
        },
        "steps": [
            {
                "name": "lora",
                "distribution": "dist-lora",
                "version": "1.0",
                "content": None,
                "options": {"rank": 8},
            }
        ],
    }
    assert lock.to_json() == json.dumps(json.loads(lock.to_json()), sort_keys=True, separators=(",", ":"))
    assert len(lock.digest) == 64


def test_objects_are_represented_without_identity(planned, monkeypatch):
    constants = types.ModuleType("constants")
    constants.bf16, constants.fp16 = Named("bf16"), Named("fp16")
    monkeypatch.setitem(sys.modules, "constants", constants)
    lock = planned(group=[object()], color=Color.RED, dtype=constants.bf16, cls=dict, other=Named("bf16"))
    assert lock.data["steps"][0]["options"] == {
        "group": [{"$object": "object"}],
        "color": {"$object": f"{__name__}.Color", "name": "RED"},
        "dtype": {"$object": f"{__name__}.Named", "name": "constants.bf16"},
        "cls": {"$object": "type", "name": "builtins.dict"},
        "other": {"$object": f"{__name__}.Named"},
    }
    assert planned(group=object()).digest == planned(group=object()).digest
    assert planned(dtype=constants.bf16).digest != planned(dtype=constants.fp16).digest


def test_values_that_json_would_confuse_stay_apart(planned):
    values = [
        {1: 2},
        {"1": 2},
        {True: 2},
        {None: 2},
        {"$map": []},
        {},
        [],
        None,
        0,
        False,
        0.0,
        "",
        float("inf"),
        "inf",
    ]
    digests = {planned(value=value).digest for value in values}
    assert len(digests) == len(values)
    assert planned(value={"a": 1, "b": 2}).digest == planned(value={"b": 2, "a": 1}).digest


def test_diff(record, registry):
    def lock(*records, request):
        return registry(*records).plan(request).lock

    options = {"options": "no_such_module:Options"}
    old = lock(
        record("quant", "weights"),
        record("lora", **options),
        record("tune"),
        request="quant + lora(rank=8) + tune",
    )
    new = lock(
        record("lora", version="2.0", before=("fsdp",), **options),
        record("fsdp", "adapters"),
        record("tune", before=("lora",)),
        request="lora(rank=16, mode='x') + fsdp + tune",
    )
    assert old.diff(new) == (
        "quant: removed",
        "fsdp: added",
        "lora: option mode unset -> x",
        "lora: option rank 8 -> 16",
        "lora: version 1.0 -> 2.0",
        "order: lora, tune -> tune, lora",
    )
    assert old.diff(old) == ()
    newer = Lock({**old.data, "host": {**old.data["host"], "torch": "99"}})
    assert old.diff(newer) == (f"host torch {version('torch')} -> 99",)


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"schema": 1}', '{"schema": 1, "host": {}, "steps": [{}]}'])
def test_other_text_is_no_lock(text):
    with pytest.raises(ResolutionError, match=r"Give the text that Lock.to_json\(\) of this version wrote"):
        Lock.from_json(text)


def test_a_lock_of_another_schema_says_so(planned):
    text = Lock({**planned().data, "schema": 2}).to_json()
    with pytest.raises(ResolutionError, match="the lock has schema 2"):
        Lock.from_json(text)


CONTENT = "result = registry.plan('aa').lock.data['steps'][0]['content']"


def test_content_is_that_of_the_files_wherever_they_lie(make_site, evaluate):
    here, there = make_site("here"), make_site("there")
    package = here.install("aa")
    there.install("aa")
    content = evaluate(CONTENT, here)
    assert content.startswith("sha256:")
    assert evaluate(CONTENT, there) == content
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"compiled")
    assert evaluate(CONTENT, here) == content
    (package / "plugin.py").write_text("class Plugin: edited = True\n")
    assert evaluate(CONTENT, here) != content


def test_content_counts_names_and_new_files(make_site, evaluate):
    site = make_site("site")
    package = site.install("aa", files={"data.bin": "x"})
    first = evaluate(CONTENT, site)
    shutil.move(package / "data.bin", package / "other.bin")
    second = evaluate(CONTENT, site)
    (package / "sub").mkdir()
    (package / "sub" / "more.py").touch()
    assert len({first, second, evaluate(CONTENT, site)}) == 3
