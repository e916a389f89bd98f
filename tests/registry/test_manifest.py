"""Manifests: what is read, and the full message for everything that is refused."""

import pytest

from thunder_xform.errors import ManifestError
from thunder_xform.manifest import Effects, Manifest

FULL = """
schema = 1
name = "fsdp"
summary = "Shard parameters"
plugin = "thunder_xform_fsdp.plugin:FSDP"
options = "thunder_xform_fsdp.options:Options"
stage = "distribute"
provides = ["parallel.shard"]
requires = ["mesh"]
wants = ["timing"]
after = ["weights.*"]
before = ["parallel.replicate"]
conflicts = ["parallel.shard"]
commutes = ["logger"]
effects = { reads = ["params.shape"], writes = ["params.layout", "trace"] }
exclusive = { "parallel.data" = ["process_group"] }
[host]
lightning-thunder = ">=0.2.6,<0.3"
python = ">=3.11"
"""

BASE = {"schema": "1", "name": '"lora"', "plugin": '"p.q:C"', "stage": '"adapters"'}


def text(**changes):
    fields = {**BASE, **changes}
    return "\n".join(f"{key} = {value}" for key, value in fields.items() if value is not None)


def test_all_fields():
    assert Manifest.parse(FULL) == Manifest(
        name="fsdp",
        summary="Shard parameters",
        plugin="thunder_xform_fsdp.plugin:FSDP",
        options="thunder_xform_fsdp.options:Options",
        stage="distribute",
        provides=("parallel.shard",),
        requires=("mesh",),
        wants=("timing",),
        after=("weights.*",),
        before=("parallel.replicate",),
        conflicts=("parallel.shard",),
        commutes=("logger",),
        effects=Effects(("params.shape",), ("params.layout", "trace")),
        exclusive={"parallel.data": ("process_group",)},
        host={"lightning-thunder": ">=0.2.6,<0.3", "python": ">=3.11"},
    )


def test_a_manifest_without_plugin_is_a_bundle():
    bundle = Manifest.parse('schema = 1\nname = "big"\nrequires = ["a", "b"]\n[defaults.a]\nrank = 4\nnames = ["x"]')
    assert bundle.is_bundle
    assert bundle.requires == ("a", "b")
    assert bundle.defaults == {"a": {"rank": 4, "names": ["x"]}}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("fsdp", True),
        ("parallel.shard", True),
        ("parallel.*", True),
        ("parallel", False),
        ("parallel.shard.*", False),
        ("parallel.sh", False),
        ("para.*", False),
        ("fsdp.*", False),
    ],
)
def test_what_an_edge_means(pattern, expected):
    assert Manifest.parse(FULL).matches(pattern) is expected


EDGE = "a plugin ('lora'), a capability ('parallel.shard') or a prefix of capabilities ('weights.*')"
FIELDS = (
    "schema, name, summary, plugin, options, stage, provides, requires, wants, after, before, "
    "conflicts, commutes, "
    "effects, exclusive, host and defaults"
)
GOLDEN = {
    "unknown field": (
        text(stagee='"x"'),
        "stagee",
        f"`stagee` is no field of a manifest. Did you mean 'stage'? Use {FIELDS}.",
    ),
    "missing schema": (text(schema=None), "schema", "`schema` is missing. Write `schema = 1`."),
    "boolean schema": (text(schema="true"), "schema", "`schema` is True. Write `schema = 1`."),
    "newer schema": (text(schema="2"), "schema", "`schema` is 2, newer than 1. Upgrade thunder-xform."),
    "missing name": (
        text(name=None),
        "name",
        "`name` is missing. Give a lower-case identifier such as 'lora'.",
    ),
    "dashed name": (
        text(name='"my-lora"'),
        "name",
        "`name` is 'my-lora'. Give a lower-case identifier such as 'lora'.",
    ),
    "keyword as name": (
        text(name='"lambda"'),
        "name",
        "`name` is 'lambda'. Give a lower-case identifier such as 'lora'.",
    ),
    "missing stage": (
        text(stage=None),
        "stage",
        "`stage` is missing. Use one of weights, adapters, distribute or schedule.",
    ),
    "misspelt stage": (
        text(stage='"adaptor"'),
        "stage",
        ("`stage` is 'adaptor'. Did you mean 'adapters'? Use one of weights, adapters, distribute or schedule."),
    ),
    "plugin without class": (text(plugin='"p.q"'), "plugin", "`plugin` is 'p.q'. Give 'module:Class'."),
    "options of wrong type": (text(options="3"), "options", "`options` is 3. Give 'module:Class'."),
    "undotted capability": (
        text(provides='["shard"]'),
        "provides",
        "`provides` contains 'shard'. Each entry is a dotted capability such as 'parallel.shard'.",
    ),
    "edge as string": (
        text(after='"quant"'),
        "after",
        f"`after` is 'quant'. Give a list; each entry is {EDGE}.",
    ),
    "edge of wrong type": (text(before="[1]"), "before", f"`before` contains 1. Each entry is {EDGE}."),
    "bare wildcard": (text(before='["*"]'), "before", f"`before` contains '*'. Each entry is {EDGE}."),
    "edge to itself": (
        text(after='["lora"]'),
        "after",
        "`after` contains 'lora', the plugin's own name. Remove it there.",
    ),
    "unknown effect": (
        text(effects='{ write = ["params"] }'),
        "effects.write",
        "`effects.write` is no field of a manifest. Did you mean 'writes'? Use reads and writes.",
    ),
    "effect of wrong form": (
        text(effects='{ writes = ["Params"] }'),
        "effects.writes",
        "`effects.writes` contains 'Params'. Each entry is a dotted name such as 'params.layout'.",
    ),
    "effects as list": (
        text(effects='["params"]'),
        "effects",
        "`effects` is ['params']. Give a table: [effects].",
    ),
    "host without operator": (
        text() + '\n[host]\ntorch = "2.13"',
        "host.torch",
        "`host.torch` is '2.13'. Give a specifier such as '>=0.2.6,<0.3'.",
    ),
    "defaults beside plugin": (
        text() + "\n[defaults.x]\na = 1",
        "defaults",
        "`defaults` presets other plugins' options, which only a bundle may. Remove it.",
    ),
    "stage in a bundle": (
        text(plugin=None),
        "stage",
        (
            "`stage` has no meaning without `plugin` (a bundle). "
            'Add `plugin = "module:Class"`, or keep to schema, name, summary, requires, defaults and host.'
        ),
    ),
    "empty bundle": (
        text(plugin=None, stage=None),
        "plugin",
        ('neither `plugin` nor `requires` is given. Add `plugin = "module:Class"`, or `requires` for a bundle.'),
    ),
    "broken syntax": (
        "schema = ",
        "",
        "not valid TOML: Invalid value (at end of document). Correct the syntax there.",
    ),
}


@pytest.mark.parametrize(("source", "field", "message"), GOLDEN.values(), ids=GOLDEN)
def test_refused(source, field, message):
    with pytest.raises(ManifestError) as caught:
        Manifest.parse(source, file="pkg/manifest.toml", distribution="thunder-xform-lora 1.0")
    assert str(caught.value) == f"pkg/manifest.toml of thunder-xform-lora 1.0: {message}"
    assert caught.value.field == field


def test_unreadable_files(tmp_path):
    with pytest.raises(ManifestError, match=r"no\.toml: cannot be read \(No such file or directory\)\. Ship it"):
        Manifest.read(tmp_path / "no.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ManifestError, match=r"cannot be read \('utf-8' codec can't decode"):
        Manifest.read(tmp_path / "latin.toml")
