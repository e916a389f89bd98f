"""What a request pulls in, what it may use, and why it is refused."""

import pytest

from thunder_xform.errors import (
    ConflictError,
    DeniedError,
    DuplicateClaimError,
    HostVersionError,
    ManifestError,
    MissingRequirementError,
    UnknownNameError,
)


def reasons(resolution):
    return {step.name: step.reason for step in resolution.steps}


def test_requirements_are_pulled_in(registry):
    r = registry(a={"requires": ("b",)}, b={"requires": ("cap.x",)}, c={"provides": ("cap.x",)}, d={})
    assert reasons(r.plan("a")) == {"a": "requested", "b": "required by a", "c": "required by b"}


def test_a_requested_provider_meets_a_requirement(registry):
    r = registry(a={"requires": ("cap.x",)}, p={"provides": ("cap.x",)}, q={"provides": ("cap.x",)})
    assert reasons(r.plan(["a", "q"])) == {"a": "requested", "q": "requested"}


def test_own_capability_does_not_meet_own_requirement(registry):
    r = registry(a={"requires": ("cap.x",), "provides": ("cap.x",)})
    with pytest.raises(MissingRequirementError):
        r.plan("a")


def test_wants_are_pulled_in_where_possible(registry):
    r = registry(a={"wants": ("b", "zz", "cap.x")}, b={}, p={"provides": ("cap.x",)}, q={"provides": ("cap.x",)})
    assert reasons(r.plan("a")) == {"a": "requested", "b": "wanted by a"}


def test_a_want_whose_requirements_are_missing_is_left_out(registry):
    r = registry(a={"wants": ("b",)}, b={"requires": ("c",)}, c={"requires": ("zz",)})
    assert r.plan("a").order == ("a",)


def test_requirements_may_form_a_circle(registry):
    assert registry(a={"requires": ("b",)}, b={"requires": ("a",)}).plan("b").order == ("a", "b")


MISSING = {
    "not installed": (
        {"a": {"requires": ("big_lora",)}},
        (
            "'a' requires 'big_lora' [dist-a 1.0: requires], which is not installed. "
            "Did you mean 'lora'? Install what provides it, or report it to the author of dist-a."
        ),
    ),
    "unlike any other": (
        {"a": {"requires": ("big_step",)}},
        (
            "'a' requires 'big_step' [dist-a 1.0: requires], which is not installed. "
            "Install it, for example: pip install thunder-xform-big-step"
        ),
    ),
    "published with this package": (
        {"a": {"requires": ("lora",)}},
        (
            "'a' requires 'lora' [dist-a 1.0: requires], which is not installed. "
            "Install it: pip install thunder-xform-lora"
        ),
    ),
    "no provider": (
        {"a": {"requires": ("cap.x",)}},
        (
            "'a' requires 'cap.x' [dist-a 1.0: requires], which no other installed plugin provides. "
            "Install a plugin that provides it."
        ),
    ),
    "several providers": (
        {"a": {"requires": ("cap.*",)}, "p": {"provides": ("cap.x",)}, "q": {"provides": ("cap.y",)}},
        (
            "'a' requires 'cap.*' [dist-a 1.0: requires], which p and q provide. "
            "Add the one you want to the request: p or q."
        ),
    ),
    "unusable": (
        {"a": {"requires": ("b",)}, "b": {"host": {"packaging": ">=9999"}}},
        (
            "'a' requires 'b' [dist-a 1.0: requires], which cannot be used: "
            "'b' [dist-b 1.0: host] needs packaging >=9999 (installed: VERSION). "
            "Install such a version, or a release of dist-b that supports the installed one."
        ),
    ),
}


@pytest.mark.parametrize(("plugins", "message"), MISSING.values(), ids=MISSING)
def test_missing_requirements(registry, plugins, message):
    from importlib.metadata import version

    with pytest.raises(MissingRequirementError) as caught:
        registry(**plugins).plan("a")
    assert str(caught.value) == message.replace("VERSION", version("packaging"))


UNKNOWN = {
    "lroa": "Did you mean 'lora'? Installed are fsdp and lora.",
    "qlora": "Installed are fsdp and lora. Install it: pip install thunder-xform-qlora",
    "dpp": "Did you mean 'ddp'? Installed are fsdp and lora. Install that, if it is what you want.",
    "my_tp": "Installed are fsdp and lora. Install it, for example: pip install thunder-xform-my-tp",
    "x; rm -rf ~": "Installed are fsdp and lora.",
    "\u0430\u0441\u0442\u043e\u0440": "Installed are fsdp and lora.",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names_that_may_be_typing_errors_are_not_recommended_to_pip(registry, name):
    with pytest.raises(UnknownNameError) as caught:
        registry(lora={}, fsdp={}).plan([(name, {})])
    assert str(caught.value) == f"no installed plugin is called {name!r}. {UNKNOWN[name]}"


def test_an_unknown_capability(registry):
    r = registry(fsdp={"provides": ("parallel.shard",)}, lora={})
    with pytest.raises(UnknownNameError) as caught:
        r.plan(["fsdp"], edges=[("lora", "parallel.shrad")])
    assert str(caught.value) == (
        "no installed plugin is called 'parallel.shrad'. Did you mean 'parallel.shard'? Installed are fsdp and lora."
    )


def test_the_plugins_that_are_published_with_this_package():
    import tomllib
    from pathlib import Path

    from thunder_xform.registry._advice import SHIPPED

    plugins = Path(__file__).parents[2] / "plugins"
    manifests = [tomllib.loads(path.read_text()) for path in plugins.glob("*/thunder_xform_*/manifest.toml")]
    assert tuple(sorted(manifest["name"] for manifest in manifests)) == SHIPPED


def test_host_out_of_range(registry):
    from importlib.metadata import version

    r = registry(a={"host": {"packaging": "<1", "python": ">=4", "no-such-dist": ">=1", "pytest": ">=1"}})
    with pytest.raises(HostVersionError) as caught:
        r.plan("a")
    import platform

    assert caught.value.unmet == (
        f"packaging <1 (installed: {version('packaging')})",
        f"python >=4 (installed: {platform.python_version()})",
    )
    assert r.list()[0].status == "incompatible"


BIG = {"stage": None, "requires": ("lora", "fsdp"), "defaults": {"lora": {"rank": 4, "names": ["a"]}}}
PLAIN = {"options": "no_such_module:Options"}


def test_bundle_is_replaced_by_what_it_requires(registry):
    r = registry(big=BIG, lora=PLAIN, fsdp={})
    resolution = r.plan("big")
    assert reasons(resolution) == {"fsdp": "required by big", "lora": "required by big"}
    assert resolution.steps[1].options == {"names": ("a",), "rank": 4}
    assert r.plan(["big", "lora(rank=16)"]).steps[1].options == {"names": ("a",), "rank": 16}
    assert r.plan("big", options={"lora": {"rank": 2}}).steps[1].options["rank"] == 2
    assert resolution.text == "fsdp + lora(names=('a',), rank=4)"
    assert r.plan(resolution.text).lock == resolution.lock
    assert next(record.status for record in r.list() if record.name == "big") == "bundle"


def test_bundles_that_disagree(registry):
    other = {"stage": None, "requires": ("lora",), "defaults": {"lora": {"rank": 8}}}
    with pytest.raises(ConflictError) as caught:
        registry(big=BIG, alt=other, lora=PLAIN, fsdp={}).plan(["big", "alt"])
    assert str(caught.value) == (
        "'alt' presets rank = 8 for 'lora', and 'big' presets 4 "
        "[dist-alt 1.0: defaults.lora.rank; dist-big 1.0: defaults.lora.rank]. "
        "Leave out one of them, and request what it stands for instead."
    )


def test_bundle_with_an_unknown_option(registry):
    with pytest.raises(ManifestError) as caught:
        registry(big=BIG, lora={}, fsdp={}).plan("big")
    assert str(caught.value) == (
        "the manifest of dist-big 1.0: `defaults.lora` sets 'rank', but "
        "'lora' [dist-lora 1.0] has no option 'rank'. It takes no options."
    )


def test_bundle_takes_no_options(registry):
    r = registry(big=BIG, lora=PLAIN, fsdp={})
    for attempt in (lambda: r.plan("big(rank=3)"), lambda: r.plan("big", options={"big": {"rank": 3}})):
        with pytest.raises(UnknownNameError) as caught:
            attempt()
        assert str(caught.value) == (
            "options are given for 'big', which is a bundle and has none of its own. "
            "Give them for what it stands for: lora and fsdp."
        )


def test_two_distributions_claim_one_name(record, registry):
    r = registry(record("fsdp", distribution="good-fsdp"), record("fsdp", distribution="evil.fsdp"), record("lora"))
    assert [(x.name, x.distribution, x.status) for x in r.list()] == [
        ("fsdp", "evil.fsdp", "duplicate"),
        ("fsdp", "good-fsdp", "duplicate"),
        ("lora", "dist-lora", "ok"),
    ]
    assert r.plan("lora").order == ("lora",)
    with pytest.raises(DuplicateClaimError) as caught:
        r.plan(["fsdp"])
    assert str(caught.value) == (
        "'fsdp' is claimed by 2 installed distributions: evil.fsdp 1.0 and good-fsdp 1.0. "
        "Uninstall all but one, or exclude the others with deny=[...] or THUNDER_XFORM_DENY."
    )
    for lists in ({"deny": ["Evil-FSDP"]}, {"allow": ["good_fsdp"]}):
        assert r.plan("fsdp", **lists).steps[0].distribution == "good-fsdp"


LISTS = {
    "deny by name": ({"deny": ["lora"]}, {}, "is excluded by deny=. Remove it from that list"),
    "deny by distribution": ({"deny": ["Dist.Lora"]}, {}, "is excluded by deny=. Remove it from that list"),
    "allow": ({"allow": ["fsdp"]}, {}, "is not on the list allow=. Add it to that list"),
    "allow nothing": ({"allow": []}, {}, "is not on the list allow=. Add it to that list"),
    "environment deny": (
        {},
        {"THUNDER_XFORM_DENY": "fsdp, lora"},
        "is excluded by THUNDER_XFORM_DENY. Remove it from that list",
    ),
    "environment allow": (
        {},
        {"THUNDER_XFORM_ALLOW": "fsdp"},
        "is not on the list THUNDER_XFORM_ALLOW. Add it to that list",
    ),
    "an argument does not lift the environment's": (
        {"allow": ["lora"]},
        {"THUNDER_XFORM_DENY": "lora"},
        "is excluded by THUNDER_XFORM_DENY. Remove it from that list",
    ),
    "empty environment allows nothing": (
        {},
        {"THUNDER_XFORM_ALLOW": ""},
        "is not on the list THUNDER_XFORM_ALLOW. Add it to that list",
    ),
}


@pytest.mark.parametrize(("lists", "environ", "message"), LISTS.values(), ids=LISTS)
def test_allow_and_deny(registry, lists, environ, message):
    r = registry(lora={}, fsdp={}, environ=environ)
    with pytest.raises(DeniedError) as caught:
        r.plan(["lora"], **lists)
    assert str(caught.value) == f"'lora' [dist-lora 1.0] {message}, or leave it out of the request."
    assert next(x.status for x in r.list(**lists) if x.name == "lora") == "denied"


@pytest.mark.parametrize("source", ["allow", "deny"])
def test_a_listed_name_must_be_installed(registry, source):
    with pytest.raises(UnknownNameError) as caught:
        registry(lora={}).plan("lora", **{source: ["loar"]})
    assert str(caught.value) == (
        f"{source}= lists 'loar', which is no installed plugin or distribution. Did you mean 'lora'? "
        "Correct the entry, or install it."
    )


def test_denied_requirements_say_so(registry):
    with pytest.raises(MissingRequirementError, match=r"which cannot be used: 'b' \[dist-b 1.0\] is excluded by deny="):
        registry(a={"requires": ("b",)}, b={}).plan("a", deny=["b"])
