"""Loading: only what was planned, fresh each time, and with errors that name who is at fault."""

import sys
import types

import pytest

from thunder_xform.errors import HostVersionError, LoadError, OptionError, PipelineError, UnknownOptionError

PLUGIN = """
class Plugin:
    def __init__(self, *options):
        self.options = options

class NeedsNothing:
    pass

class Fails:
    def __init__(self, *options):
        raise RuntimeError("no device")

class Exits:
    def __init__(self, *options):
        raise SystemExit(0)

class Refuses:
    def __init__(self, *options):
        from thunder_xform.errors import PipelineError
        raise PipelineError("not with these.", "Use others.")
"""
OPTIONS = """
from dataclasses import dataclass, field

class Base:
    pass

@dataclass(frozen=True)
class Options(Base):
    rank: int = 8
    alpha: float = 16.0
    names: tuple[str, ...] = ()
    derived: int = field(init=False, default=0)

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, but must be at least 1.")

@dataclass(frozen=True)
class Needy:
    size: int
    other: int = 0
"""


@pytest.fixture
def resolve(registry, tmp_path, monkeypatch):
    """Resolve `lora`, made of the given classes, with a pipeline that only keeps what it was given."""
    package = tmp_path / "loaded_plugin"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(PLUGIN)
    (package / "options.py").write_text(OPTIONS)
    (package / "broken.py").write_text("import not_there")
    (package / "exits.py").write_text("import sys; sys.exit('bye')")
    monkeypatch.syspath_prepend(tmp_path)
    pipeline = types.ModuleType("thunder_xform.pipeline")
    pipeline.build = lambda resolution, plugins, check: (resolution, plugins)
    pipeline.Plugin = lambda options: None
    monkeypatch.setitem(sys.modules, "thunder_xform.pipeline", pipeline)

    def run(request="lora", plugin="plugin:Plugin", options="options:Options", host=None, **keywords):
        module = "loaded_plugin."
        fields = {"plugin": module + plugin, "options": options and module + options, "host": host or {}}
        return registry(lora=fields, other={}).resolve(request, **keywords)

    yield run
    for name in [name for name in sys.modules if name.startswith("loaded_plugin")]:
        del sys.modules[name]


def test_options_are_built_and_plugins_are_fresh(resolve):
    resolution, ((step, plugin),) = resolve("lora(rank=4, alpha=2, names=['a'])")
    assert step is resolution.steps[0]
    (built,) = plugin.options
    assert (built.rank, built.alpha, built.names) == (4, 2.0, ("a",))
    assert type(built.alpha) is float
    assert resolve("lora(rank=4)")[1][0][1] is not plugin
    assert "no_such_package_other" not in sys.modules


def test_a_plugin_without_options(resolve):
    ((_, plugin),) = resolve(plugin="plugin:NeedsNothing", options=None)[1]
    assert type(plugin).__name__ == "NeedsNothing"


def test_a_plugin_instance_is_used_as_it_is(resolve):
    import loaded_plugin.plugin

    instance = loaded_plugin.plugin.Plugin()
    ((_, plugin),) = resolve([instance])[1]
    assert plugin is instance


LOAD_ERRORS = {
    "missing import": (
        {"plugin": "broken:Plugin"},
        ("'loaded_plugin.broken:Plugin' cannot be imported (ModuleNotFoundError: No module named 'not_there')."),
        ModuleNotFoundError,
    ),
    "missing module": (
        {"options": "nowhere:Options"},
        (
            "'loaded_plugin.nowhere:Options' cannot be imported "
            "(ModuleNotFoundError: No module named 'loaded_plugin.nowhere')."
        ),
        ModuleNotFoundError,
    ),
    "missing class": (
        {"plugin": "plugin:Plugn"},
        (
            "'loaded_plugin.plugin:Plugn' cannot be imported "
            "(AttributeError: module 'loaded_plugin.plugin' has no attribute 'Plugn')."
        ),
        AttributeError,
    ),
    "failing constructor": (
        {"plugin": "plugin:Fails"},
        "'loaded_plugin.plugin:Fails' cannot be instantiated (RuntimeError: no device).",
        RuntimeError,
    ),
    "V40: constructor that exits": (
        {"plugin": "plugin:Exits"},
        "'loaded_plugin.plugin:Exits' cannot be instantiated (SystemExit: 0).",
        SystemExit,
    ),
    "V40: import that exits": (
        {"plugin": "exits:Plugin"},
        "'loaded_plugin.exits:Plugin' cannot be imported (SystemExit: bye).",
        SystemExit,
    ),
    "V40: options that exit": (
        {"options": "exits:Options"},
        "'loaded_plugin.exits:Options' cannot be imported (SystemExit: bye).",
        SystemExit,
    ),
}


@pytest.mark.parametrize(("classes", "message", "cause"), LOAD_ERRORS.values(), ids=LOAD_ERRORS)
def test_load_errors_chain_the_cause(resolve, classes, message, cause):
    with pytest.raises(LoadError) as caught:
        resolve(**classes)
    assert str(caught.value) == (
        f"'lora' [dist-lora 1.0]: {message} "
        "Install what it misses, or reinstall it: pip install --force-reinstall dist-lora"
    )
    assert type(caught.value.__cause__) is cause
    assert (caught.value.distribution, caught.value.version) == ("dist-lora", "1.0")


def test_an_error_of_this_package_passes_through(resolve):
    with pytest.raises(PipelineError, match=r"not with these\. Use others\."):
        resolve(plugin="plugin:Refuses")


def test_u23_unknown_option_of_a_class_that_could_not_be_read(resolve):
    with pytest.raises(UnknownOptionError) as caught:
        resolve("lora(rnk=4)")
    assert str(caught.value) == (
        "'lora' [dist-lora 1.0] has no option 'rnk'. Did you mean 'rank'? Its options are rank, alpha and names."
    )


def test_values_are_checked_against_the_loaded_class(resolve):
    with pytest.raises(OptionError) as caught:
        resolve("lora(names='q_proj')")
    assert str(caught.value) == (
        "the option 'names' of 'lora' [dist-lora 1.0] is 'q_proj', which it does not take. Give tuple[str, ...]."
    )


def test_the_options_class_may_refuse(resolve):
    with pytest.raises(OptionError) as caught:
        resolve("lora(rank=0)")
    assert str(caught.value) == (
        "'lora' [dist-lora 1.0] refuses its options: rank is 0, but must be at least 1. They were rank=0."
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_required_options(resolve):
    with pytest.raises(OptionError) as caught:
        resolve(options="options:Needy")
    assert str(caught.value) == "'lora' [dist-lora 1.0] needs the option 'size'. Give it: ('lora', {'size': ...})."
    assert resolve("lora(size=1)", options="options:Needy")[1][0][1].options[0].size == 1


def test_a_host_that_is_absent_stops_resolve_but_not_plan(resolve, registry):
    host = {"no-such-distribution": ">=1"}
    assert registry(lora={"host": host}).plan("lora").order == ("lora",)
    with pytest.raises(HostVersionError) as caught:
        resolve(host=host)
    assert str(caught.value) == (
        "'lora' [dist-lora 1.0: host] needs no-such-distribution >=1 (not installed). "
        "Install such a version, or a release of dist-lora that supports the installed one."
    )


def test_nothing_is_imported_when_the_plan_fails(resolve):
    with pytest.raises(UnknownOptionError):
        resolve("lora + other(x=1)")
    assert "loaded_plugin.plugin" not in sys.modules
