"""What may not be together (U18), and what may not be left unordered."""

import pytest

from thunder_xform.errors import ConflictError, UnorderedEffectsError

SHARD = {"stage": "distribute", "provides": ("parallel.shard",), "conflicts": ("parallel.shard",)}


def test_conflict_with_a_name(registry):
    with pytest.raises(ConflictError) as caught:
        registry(a={"conflicts": ("b",)}, b={}).plan(["b", "a"])
    assert str(caught.value) == (
        "'a' and 'b' exclude each other [dist-a 1.0: conflicts = ['b']]. Leave out 'a' (requested) or 'b' (requested)."
    )


def test_at_most_one_provider(registry):
    r = registry(fsdp=SHARD, zero={**SHARD, "conflicts": ()})
    assert r.plan("fsdp").order == ("fsdp",)
    with pytest.raises(ConflictError) as caught:
        r.plan(["zero", "fsdp"])
    assert str(caught.value) == (
        "'fsdp' and 'zero' exclude each other "
        "[dist-fsdp 1.0: conflicts = ['parallel.shard']; dist-zero 1.0: provides = ['parallel.shard']]. "
        "Leave out 'fsdp' (requested) or 'zero' (requested)."
    )


def test_a_conflict_says_who_was_pulled_in(registry):
    r = registry(a={"wants": ("b",)}, b={"conflicts": ("c",)}, c={})
    with pytest.raises(ConflictError, match=r"'b' \(wanted by a\) or 'c' \(requested\), for example with deny="):
        r.plan(["a", "c"])
    assert r.plan(["a", "c"], deny=["b"]).order == ("a", "c")


class Group:
    """Stands for a process group: compared by identity, and its equality must not be trusted."""

    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = None


@pytest.fixture
def data_parallel(registry, tmp_path, monkeypatch):
    """fsdp and ddp with an options class each, found on sys.path."""
    for name in ("fsdp", "ddp"):
        package = tmp_path / f"u18_{name}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "options.py").write_text(
            "from dataclasses import dataclass\n@dataclass\nclass Options:\n"
            "    process_group: object = None\n    mesh_dim: str = 'dp'\n    bucket_mb: int = 25\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    common = {"stage": "distribute", "exclusive": {"parallel.data": ("process_group", "mesh_dim")}}
    return registry(
        fsdp={**common, "options": "u18_fsdp.options:Options", "before": ("ddp",)},
        ddp={**common, "options": "u18_ddp.options:Options"},
    )


def test_u18_two_on_the_default_process_group(data_parallel):
    with pytest.raises(ConflictError) as caught:
        data_parallel.plan(["fsdp", "ddp"])
    assert str(caught.value) == (
        "'ddp' and 'fsdp' both occupy 'parallel.data' with the same process_group = None, mesh_dim = 'dp' "
        "[dist-ddp 1.0: exclusive = {'parallel.data' = ['process_group', 'mesh_dim']}; "
        "dist-fsdp 1.0: exclusive = {'parallel.data' = ['process_group', 'mesh_dim']}]. "
        "Give them different values of mesh_dim or process_group, or leave one of them out."
    )


def test_u18_two_on_one_given_process_group(data_parallel):
    group = Group()
    options = {"fsdp": {"process_group": group}, "ddp": {"process_group": group}}
    with pytest.raises(ConflictError, match=r"both occupy 'parallel\.data'"):
        data_parallel.plan(["fsdp", "ddp"], options=options)


@pytest.mark.parametrize(
    "options",
    [
        {"fsdp": {"process_group": Group()}, "ddp": {"process_group": Group()}},
        {"fsdp": {"process_group": Group()}},
        {"fsdp": {"mesh_dim": "shard"}, "ddp": {"mesh_dim": "replicate"}},
    ],
    ids=["two groups", "one group and the default", "two dimensions"],
)
def test_u18_different_groups_pass(data_parallel, options):
    assert data_parallel.plan(["ddp", "fsdp"], options=options).order == ("fsdp", "ddp")


def test_u18_defaults_spelt_out_are_the_same(data_parallel):
    with pytest.raises(ConflictError):
        data_parallel.plan(["fsdp", ("ddp", {"mesh_dim": "dp", "process_group": None})])


UNORDERED = (
    "nothing orders 'a' and 'b', although 'a' writes 'params' [dist-a 1.0: effects.writes] "
    "and 'b' reads 'params.layout' [dist-b 1.0: effects.reads]. "
    "Say which comes first, for example edges=[('a', 'b')]; "
    "their authors can settle it with `after`, `before` or `commutes`."
)


def test_unordered_effects(registry):
    r = registry(a={"writes": ("params",)}, b={"reads": ("params.layout", "trace")})
    with pytest.raises(UnorderedEffectsError) as caught:
        r.plan(["b", "a"])
    assert str(caught.value) == UNORDERED
    assert caught.value.names == ("a", "b")
    assert caught.value.effects == (("params", "params.layout"),)


WRITES = {"writes": ("params.layout",)}
SETTLED = {
    "stage": ({"a": {**WRITES, "stage": "weights"}, "b": {**WRITES, "stage": "schedule"}}, ()),
    "after": ({"a": {**WRITES, "after": ("b",)}, "b": WRITES}, ()),
    "through a third": ({"a": WRITES, "b": WRITES, "m": {"after": ("a",), "before": ("b",)}}, ()),
    "caller": ({"a": WRITES, "b": WRITES}, (("b", "a"),)),
    "commutes, one side": ({"a": {**WRITES, "commutes": ("b",)}, "b": WRITES}, ()),
    "commutes, the other side": ({"a": WRITES, "b": {**WRITES, "commutes": ("a",)}}, ()),
    "commutes with a capability": (
        {"a": {**WRITES, "provides": ("cap.x",)}, "b": {**WRITES, "commutes": ("cap.*",)}},
        (),
    ),
    "both only read": ({"a": {"reads": ("params",)}, "b": {"reads": ("params",)}}, ()),
    "siblings": ({"a": {"writes": ("params.data",)}, "b": {"writes": ("params.layout",)}}, ()),
    "a common prefix of letters": (
        {"a": {"writes": ("params.lay",)}, "b": {"writes": ("params.layout",)}},
        (),
    ),
}


@pytest.mark.parametrize(("plugins", "edges"), SETTLED.values(), ids=SETTLED)
def test_settled_effects(registry, plugins, edges):
    assert len(registry(**plugins).plan(list(plugins), edges=edges)) == len(plugins)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"writes": ("params.layout",)}, {"writes": ("params",)}),
        ({"writes": ("params",)}, {"writes": ("params",)}),
        ({"reads": ("params.layout.dim",)}, {"writes": ("params.layout",)}),
    ],
)
def test_clashes_by_prefix_in_both_directions(registry, a, b):
    with pytest.raises(UnorderedEffectsError):
        registry(a=a, b=b).plan(["a", "b"])
