"""Exact orders, explanations and cycles. Dummy plugins are named by their stage and what they declare."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_xform.errors import CycleError, DuplicateRequestError, UnknownNameError

W, A, D, S = "weights", "adapters", "distribute", "schedule"

# name -> (plugins in request order, edges of the caller, expected order)
GOLDEN = {
    "stages": (
        {"s": {"stage": S}, "d": {"stage": D}, "a": {"stage": A}, "w": {"stage": W}},
        (),
        "w a d s",
    ),
    "names break ties": ({"a_c": {}, "a_a": {}, "a_b": {}}, (), "a_a a_b a_c"),
    "after a name": ({"a_after_b": {"after": ("b",)}, "b": {}}, (), "b a_after_b"),
    "before a name": ({"a": {}, "z_before_a": {"before": ("a",)}}, (), "z_before_a a"),
    "after a capability": (
        {
            "a_after_x": {"after": ("cap.x",)},
            "p_x": {"provides": ("cap.x",)},
            "q_x": {"provides": ("cap.x",)},
        },
        (),
        "p_x q_x a_after_x",
    ),
    "before a prefix": (
        {"a_x": {"provides": ("cap.x",)}, "b": {}, "z_before_cap": {"before": ("cap.*",)}},
        (),
        "b z_before_cap a_x",
    ),
    "a prefix leaves its own provider alone": (
        {"a": {"provides": ("cap.x",), "before": ("cap.*",)}, "b": {"provides": ("cap.y",)}},
        (),
        "a b",
    ),
    "an absent plugin orders nothing": (
        {"b": {}, "a_after_zz": {"after": ("zz", "cap.zz")}},
        (),
        "a_after_zz b",
    ),
    "requires is no order": ({"a_requires_b": {"requires": ("b",)}, "b": {}}, (), "a_requires_b b"),
    "chain against the names": (
        {"a_after_b": {"after": ("b_after_c",)}, "b_after_c": {"after": ("c",)}, "c": {}},
        (),
        "c b_after_c a_after_b",
    ),
    "the smallest ready name goes first": (
        {"b": {}, "a_after_z": {"after": ("z",)}, "z": {}, "c": {}},
        (),
        "b c z a_after_z",
    ),
    "edges that agree with the stages": (
        {"d": {"stage": D, "after": ("a",)}, "a": {"stage": A, "before": ("d",)}},
        (),
        "a d",
    ),
    "an edge of the caller": ({"a": {}, "b": {}}, (("b", "a"),), "b a"),
    "an edge of the caller by capability": (
        {"a": {}, "b": {"provides": ("cap.x",)}},
        (("cap.*", "a"),),
        "b a",
    ),
    "both declared and asked for": ({"a": {}, "b": {"before": ("a",)}}, (("b", "a"),), "b a"),
    "nothing": ({}, (), ""),
}


@pytest.mark.parametrize(("plugins", "edges", "expected"), GOLDEN.values(), ids=GOLDEN)
def test_exact_order(registry, plugins, edges, expected):
    assert " ".join(registry(**plugins).plan(list(plugins), edges=edges).order) == expected


def test_why_gives_the_shortest_chain(registry):
    r = registry(a={"before": ("b",)}, b={"before": ("c",)}, c={}, d={})
    resolution = r.plan(["d", "c", "b", "a"])
    assert resolution.order == ("a", "b", "c", "d")
    assert str(resolution.why("c", "a")) == (
        "'a' runs before 'c':\n"
        "  'a' runs before 'b' [dist-a 1.0: before = ['b']]\n"
        "  'b' runs before 'c' [dist-b 1.0: before = ['c']]"
    )
    assert str(resolution.why("a", "b")) == "'a' runs before 'b' [dist-a 1.0: before = ['b']]"
    assert str(resolution.why("d", "a")) == "'a' runs before 'd' by name alone: no stage or edge orders them."


def test_why_prefers_what_somebody_wrote_over_stages(registry):
    r = registry(lora={"stage": A, "before": ("parallel.*",)}, fsdp={"stage": D, "provides": ("parallel.shard",)})
    assert str(r.why("fsdp", "lora")) == "'lora' runs before 'fsdp' [dist-lora 1.0: before = ['parallel.*']]"
    r = registry(lora={"stage": A}, fsdp={"stage": D})
    assert str(r.why("fsdp", "lora")) == (
        "'lora' runs before 'fsdp' [dist-lora 1.0: stage = 'adapters'; dist-fsdp 1.0: stage = 'distribute']"
    )
    assert str(r.why("fsdp", "lora", edges=[("lora", "fsdp")])) == (
        "'lora' runs before 'fsdp' [edges=[('lora', 'fsdp')]]"
    )


def test_why_of_an_absent_plugin(registry):
    with pytest.raises(UnknownNameError) as caught:
        registry(lora={}, fsdp={}).plan(["lora", "fsdp"]).why("lora", "fsdb")
    assert str(caught.value) == ("'fsdb' is not in this pipeline. Did you mean 'fsdp'? It consists of fsdp and lora.")


def test_cycle_names_declarations_and_fields(registry):
    r = registry(a={"before": ("b",)}, b={"before": ("cap.x",)}, c={"provides": ("cap.x",), "before": ("a",)}, d={})
    with pytest.raises(CycleError) as caught:
        r.plan(["a", "b", "c", "d"])
    assert str(caught.value) == (
        "the order of a, b and c contradicts itself: "
        "'a' runs before 'b' [dist-a 1.0: before = ['b']], "
        "'b' runs before 'c' [dist-b 1.0: before = ['cap.x']] and "
        "'c' runs before 'a' [dist-c 1.0: before = ['a']]. "
        "Drop one of them from the request, or one of these declarations."
    )
    assert caught.value.cycle == ("a", "b", "c")


def test_an_edge_against_the_stages_names_both(registry):
    r = registry(lora={"stage": A, "after": ("fsdp",)}, fsdp={"stage": D})
    with pytest.raises(CycleError) as caught:
        r.plan(["lora", "fsdp"])
    assert str(caught.value) == (
        "the order of fsdp and lora contradicts itself: "
        "'lora' runs before 'fsdp' [dist-lora 1.0: stage = 'adapters'; dist-fsdp 1.0: stage = "
        "'distribute'] and "
        "'fsdp' runs before 'lora' [dist-lora 1.0: after = ['fsdp']]. "
        "Drop one of them from the request, or one of these declarations."
    )


def test_an_edge_of_the_caller_in_a_cycle_is_named(registry):
    with pytest.raises(CycleError) as caught:
        registry(a={"before": ("b",)}, b={}).plan(["a", "b"], edges=[("b", "a")])
    assert "[edges=[('b', 'a')]]" in str(caught.value)
    assert str(caught.value).endswith("Drop one of them from the request, or one of your `edges`.")


def test_an_edge_of_the_caller_to_nothing_known(registry):
    r = registry(lora={}, fsdp={})
    with pytest.raises(UnknownNameError, match=r"called 'fsdpp'\. Did you mean 'fsdp'\?"):
        r.plan(["lora"], edges=[("lora", "fsdpp")])
    assert r.plan(["lora"], edges=[("lora", "fsdp")]).order == ("lora",)


SELF = {
    "a name": ("a", "a", "a"),
    "a name and its capability": ("cap.x", "a", "a"),
    "a prefix and a name": ("a", "cap.*", "a"),
    "a plugin that is not requested": ("b", "b", "b"),
}


@pytest.mark.parametrize(("first", "then", "name"), SELF.values(), ids=SELF)
def test_v22_an_edge_to_itself_is_a_cycle(registry, first, then, name):
    with pytest.raises(CycleError) as caught:
        registry(a={"provides": ("cap.x",)}, b={}).plan(["a"], edges=[(first, then)])
    assert str(caught.value) == (
        f"the order of {name} contradicts itself: {name!r} runs before {name!r} [edges=[({first!r}, {then!r})]]. "
        "Give an edge two different plugins."
    )
    assert caught.value.cycle == (name,)


def test_v22_why_of_one_plugin_alone(registry):
    r = registry(lora={}, fsdp={})
    for ask in (r.why, r.plan(["lora", "fsdp"]).why):
        with pytest.raises(DuplicateRequestError) as caught:
            ask("lora", "lora")
        assert str(caught.value) == "'lora' is named twice, but nothing runs before itself. Name two plugins."


NAMES = "abcdef"
edge_sets = st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(lambda e: e[0] != e[1]))


def shortest_cycle_length(edges):
    """By powers of the adjacency relation, independently of the search under test."""
    walks, length = set(edges), 1
    while walks and length <= len(NAMES):
        if any(a == b for a, b in walks):
            return length
        walks = {(a, c) for a, b in walks for b2, c in edges if b == b2}
        length += 1
    return None


@given(edge_sets)
def test_an_order_keeps_all_edges_and_a_cycle_is_real_and_minimal(record, registry, edges):
    befores = {n: tuple(sorted(b for a, b in edges if a == n)) for n in NAMES}
    r = registry(*(record(name, before=befores[name]) for name in NAMES))
    shortest = shortest_cycle_length(edges)
    try:
        order = r.plan(list(NAMES)).order
    except CycleError as error:
        cycle = error.cycle
        assert len(cycle) == shortest
        assert all(pair in edges for pair in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
    else:
        assert shortest is None
        assert sorted(order) == list(NAMES)
        assert all(order.index(a) < order.index(b) for a, b in edges)
