"""Installed plugins, good and bad: a problem stays with its distribution, and no plugin code is executed."""

import pytest

LIST = """
result = [
    [r.name, r.status, r.distribution, r.version, str(r.error) if r.error else None] for r in registry.list()
]
result.append(sorted(name for name in sys.modules if name.startswith("imported_")))
"""
ASK = """
from thunder_xform.errors import XformError
try:
    registry.plan({name!r})
    result = None
except XformError as error:
    result = [type(error).__name__, str(error)]
"""


def test_nothing_is_installed(site, evaluate):
    assert evaluate(LIST, site) == [[]]


def test_records_are_sorted_and_nothing_is_imported(site, evaluate):
    site.install("lora", version="0.3")
    site.install("fsdp", distribution="Thunder_Xform.FSDP", version="1.2rc1")
    assert evaluate(LIST, site) == [
        ["fsdp", "ok", "Thunder_Xform.FSDP", "1.2rc1", None],
        ["lora", "ok", "thunder-xform-lora", "0.3", None],
        [],
    ]


BROKEN = {
    "not TOML": (
        {"manifest": "schema ="},
        "ManifestError",
        (
            "thunder_xform_bad/manifest.toml of thunder-xform-bad 1.0: "
            "not valid TOML: Invalid value (at end of document). Correct the syntax there."
        ),
    ),
    "bad field": (
        {"manifest": 'schema = 1\nname = "bad"\nplugin = "a:B"\nstage = "adaptors"'},
        "ManifestError",
        (
            "thunder_xform_bad/manifest.toml of thunder-xform-bad 1.0: `stage` is 'adaptors'. "
            "Did you mean 'adapters'? Use one of weights, adapters, distribute or schedule."
        ),
    ),
    "other name": (
        {"manifest": 'schema = 1\nname = "good"\nplugin = "a:B"\nstage = "adapters"'},
        "DiscoveryError",
        (
            "thunder-xform-bad 1.0, entry point 'bad': its name differs from `name` in "
            "thunder_xform_bad/manifest.toml, "
            "which is 'good'. Give both the same name."
        ),
    ),
    "no such file": (
        {"entry_points": "[thunder_xform.plugins]\nbad = thunder_xform_bad:declared.cfg\n"},
        "DiscoveryError",
        (
            "thunder-xform-bad 1.0, entry point 'bad': the package 'thunder_xform_bad' contains "
            "no file 'declared.cfg'. "
            "Ship the manifest as package data, or reinstall the distribution."
        ),
    ),
    "V46: a misspelt file": (
        {"entry_points": "[thunder_xform.plugins]\nbad = thunder_xform_bad:manfest.toml\n"},
        "DiscoveryError",
        (
            "thunder-xform-bad 1.0, entry point 'bad': the package 'thunder_xform_bad' contains no file "
            "'manfest.toml'. Did you mean 'manifest.toml'? Ship the manifest as package data, or reinstall the "
            "distribution."
        ),
    ),
    "no such package": (
        {"entry_points": "[thunder_xform.plugins]\nbad = gone:manifest.toml\n"},
        "DiscoveryError",
        (
            "thunder-xform-bad 1.0, entry point 'bad': the package 'gone' is not importable. "
            "Reinstall it: pip install --force-reinstall thunder-xform-bad."
        ),
    ),
    "no file named": (
        {"entry_points": "[thunder_xform.plugins]\nbad = thunder_xform_bad\n"},
        "DiscoveryError",
        (
            "thunder-xform-bad 1.0, entry point 'bad': the entry point 'thunder_xform_bad' "
            "names no manifest. "
            'Write it as "package:manifest.toml".'
        ),
    ),
    "V20: nested brackets": (
        {"manifest": "schema = " + "[" * 5000},
        "ManifestError",
        (
            "thunder_xform_bad/manifest.toml of thunder-xform-bad 1.0: not readable as TOML (RecursionError). "
            "Correct what is nested too deeply or too long there."
        ),
    ),
    "V20: nested tables": (
        {"manifest": "schema = " + "{a = " * 5000},
        "ManifestError",
        (
            "thunder_xform_bad/manifest.toml of thunder-xform-bad 1.0: not readable as TOML (RecursionError). "
            "Correct what is nested too deeply or too long there."
        ),
    ),
    "V20: a number of many digits": (
        {"manifest": "schema = " + "1" * 5000},
        "ManifestError",
        (
            "thunder_xform_bad/manifest.toml of thunder-xform-bad 1.0: not readable as TOML (ValueError). "
            "Correct what is nested too deeply or too long there."
        ),
    ),
    "V21: a path out of the package": (
        {"entry_points": "[thunder_xform.plugins]\nbad = thunder_xform_bad:../thunder_xform_lora/manifest.toml\n"},
        "DiscoveryError",
        (
            "thunder-xform-bad 1.0, entry point 'bad': the manifest '../thunder_xform_lora/manifest.toml' lies "
            "outside of the package 'thunder_xform_bad'. Ship it as a file of the package."
        ),
    ),
    "V21: an absolute path": (
        {"entry_points": "[thunder_xform.plugins]\nbad = thunder_xform_bad:/etc/hostname\n"},
        "DiscoveryError",
        (
            "thunder-xform-bad 1.0, entry point 'bad': the manifest '/etc/hostname' lies outside of the package "
            "'thunder_xform_bad'. Ship it as a file of the package."
        ),
    ),
}


@pytest.mark.parametrize(("how", "kind", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_one_record_and_an_error_when_asked_for(site, evaluate, how, kind, message):
    site.install("bad", **how)
    site.install("lora")
    assert evaluate(LIST, site) == [
        ["bad", "broken", "thunder-xform-bad", "1.0", message],
        ["lora", "ok", "thunder-xform-lora", "1.0", None],
        [],
    ]
    assert evaluate(ASK.format(name="lora"), site) is None
    assert evaluate(ASK.format(name="bad"), site) == [kind, message]


def test_v21_a_manifest_that_is_a_link_out_of_its_package(site, evaluate, tmp_path):
    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text("secret = 1")
    manifest = site.install("bad") / "manifest.toml"
    manifest.unlink()
    manifest.symlink_to(elsewhere)
    ((_, status, _, _, message), _) = evaluate(LIST, site)
    assert status == "broken"
    assert message == (
        "thunder-xform-bad 1.0, entry point 'bad': the manifest 'manifest.toml' lies outside of the package "
        "'thunder_xform_bad'. Ship it as a file of the package."
    )


MISSPELT = (
    " thunder_xform.plugins ",
    "thunder_xform.plugin",
    "thunder-xform.plugins",
    "thunder_xfrom.plugins",
    "Thunder_Xform.Plugins",
)
OTHERS = ("thunder_xform.schemes", "lightning_xform.plugins", "thunder.plugins", "pytest11")


def test_v46_misspelt_groups_are_named_and_others_are_nobodys_error(site, evaluate):
    for i, group in enumerate((*MISSPELT, *OTHERS)):
        text = f"[console_scripts]\nx = y:z\n[{group}]\np{i} = thunder_xform_p{i}:manifest.toml\n"
        site.install(f"p{i}", entry_points=text)
    messages = [
        f"thunder-xform-p{i} 1.0, entry point 'p{i}': it is announced in the group {group!r}, which nothing reads. "
        "Call the group 'thunder_xform.plugins', and reinstall it."
        for i, group in enumerate(MISSPELT)
    ]
    expected = [[f"p{i}", "broken", f"thunder-xform-p{i}", "1.0", message] for i, message in enumerate(messages)]
    assert evaluate(LIST, site) == [*expected, []]
    assert evaluate(ASK.format(name="p0"), site) == ["DiscoveryError", messages[0]]


def test_v46_a_misspelt_entry_point_is_named_by_the_name_in_the_manifest_too(site, evaluate):
    site.install("lora", entry_points="[thunder_xform.plugins]\nadapters = thunder_xform_lora:manifest.toml\n")
    message = (
        "thunder-xform-lora 1.0, entry point 'adapters': its name differs from `name` in "
        "thunder_xform_lora/manifest.toml, which is 'lora'. Give both the same name."
    )
    for name in ("lora", "adapters"):
        assert evaluate(ASK.format(name=name), site) == ["DiscoveryError", message]


def test_v46_one_misspelt_group_among_others(site, evaluate):
    text = "[thunder_xform.plugins]\n{0}\n[thunder_xform.plugin]\n{0}\nother = thunder_xform_lora:manifest.toml\n"
    site.install("lora", entry_points=text.format("lora = thunder_xform_lora:manifest.toml"))
    lora, other, _ = evaluate(LIST, site)
    assert lora[:2] == ["lora", "ok"]
    assert other[:2] == ["other", "broken"]


def test_unparsable_entry_points(site, evaluate):
    site.install("bad", entry_points="[thunder_xform.plugins]\nthis line says nothing\n")
    site.install("lora")
    (good, bad, _) = evaluate(LIST, site)
    assert good[1] == "ok"
    assert bad == [
        "thunder-xform-bad",
        "broken",
        "thunder-xform-bad",
        "1.0",
        (
            "thunder-xform-bad 1.0: the group thunder_xform.plugins of its entry_points.txt "
            "contains nothing that can be "
            "read. Reinstall it, or report it to its author: pip install --force-reinstall thunder-xform-bad"
        ),
    ]


def test_metadata_without_a_name(site, evaluate):
    site.install("bad")
    (site.path / "thunder_xform_bad-1.0.dist-info" / "METADATA").write_text("")
    site.install("lora")
    (bad, good, _) = evaluate(LIST, site)
    assert bad[4] == (
        f"a distribution in {site.path} announces plugins, but its metadata has no readable name. "
        "Remove its remains from that directory, and install it again."
    )
    assert good[1] == "ok"


def test_stale_metadata_in_one_directory(site, evaluate):
    site.install("lora", version="0.1")
    site.install("lora", version="0.2")
    message = (
        "thunder-xform-lora is installed in versions 0.1 and 0.2 at once, in one directory. "
        "Reinstall it: pip install --force-reinstall thunder-xform-lora"
    )
    assert evaluate(LIST, site)[0] == ["lora", "broken", "thunder-xform-lora", "0.1 and 0.2", message]
    assert evaluate(ASK.format(name="lora"), site) == ["DiscoveryError", message]


def test_the_first_installation_on_the_path_counts_and_hides_the_others(make_site, evaluate):
    first, second = make_site("first"), make_site("second")
    first.install("lora", version="0.2")
    second.install("lora", version="0.1")
    code = "result = [[r.version, r.status, r.shadowed] for r in registry.list()]"
    assert evaluate(code, first, second) == [["0.2", "ok", [f"0.1 in {second.path}"]]]
    assert evaluate(code, second, first) == [["0.1", "ok", [f"0.2 in {first.path}"]]]
    assert evaluate(code, first, first) == [["0.2", "ok", []]]


def test_two_distributions_claim_one_name(make_site, evaluate):
    first, second = make_site("first"), make_site("second")
    first.install("fsdp", distribution="good-fsdp")
    second.install("fsdp", distribution="evil-fsdp")
    message = (
        "'fsdp' is claimed by 2 installed distributions: evil-fsdp 1.0 and good-fsdp 1.0. "
        "Uninstall all but one, or exclude the others with deny=[...] or THUNDER_XFORM_DENY."
    )
    for sites in ((first, second), (second, first)):
        assert [record[1:3] for record in evaluate(LIST, *sites)[:-1]] == [
            ["duplicate", "evil-fsdp"],
            ["duplicate", "good-fsdp"],
        ]
        assert evaluate(ASK.format(name="fsdp"), *sites) == ["DuplicateClaimError", message]
        assert evaluate(ASK.format(name="fsdp"), *sites, THUNDER_XFORM_DENY="evil-fsdp") is None


def test_editable_install_through_an_import_hook(site, make_site, evaluate):
    """As setuptools and others do it: metadata in site-packages, the package found by a finder."""
    source = make_site("source")
    package = source.install("lora")
    site.install("lora")
    for file in sorted((site.path / "thunder_xform_lora").iterdir()):
        file.unlink()
    (site.path / "thunder_xform_lora").rmdir()
    code = f"""
import importlib.machinery, importlib.util
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "thunder_xform_lora":
            places = [{str(package)!r}]
            return importlib.util.spec_from_file_location(
                name, places[0] + "/__init__.py", submodule_search_locations=places
            )
sys.meta_path.append(Finder)
result = [registry.list()[0].status, registry.plan("lora").lock.data["steps"][0]["content"]]
"""
    status, content = evaluate(code, site)
    assert status == "ok"
    installed = "result = registry.plan('lora').lock.data['steps'][0]['content']"
    assert content == evaluate(installed, source)


def test_manifest_below_a_subpackage_of_a_namespace_package(site, evaluate):
    """The parents are not executed: only the top level goes through the import system."""
    nested = site.path / "acme" / "lora"
    nested.mkdir(parents=True)
    (site.path / "acme" / "__init__.py").write_text("raise RuntimeError('executed')")
    (nested / "manifest.toml").write_text('schema = 1\nname = "lora"\nplugin = "acme.lora.p:P"\nstage = "adapters"')
    site.install("lora", entry_points="[thunder_xform.plugins]\nlora = acme.lora:manifest.toml\n")
    assert evaluate(LIST, site)[0][:2] == ["lora", "ok"]


def test_one_scan_per_process(site, evaluate):
    site.install("lora")
    code = f"""
import importlib_metadata
scans, original = [], importlib_metadata.distributions
importlib_metadata.distributions = lambda **k: scans.append(1) or original(**k)
for _ in range(3):
    registry.list(), registry.plan("lora"), registry.plan("lora").lock
once, seen = len(scans), [r.name for r in registry.list()]
import pathlib, shutil
shutil.rmtree({str(site.path)!r} + "/thunder_xform_lora-1.0.dist-info")
importlib_metadata.MetadataPathFinder.invalidate_caches()
still = [r.name for r in registry.list()]
registry.clear_cache()
result = [once, seen, still, [r.name for r in registry.list()]]
"""
    assert evaluate(code, site) == [1, ["lora"], ["lora"], []]
