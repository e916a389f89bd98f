"""`thunder-xform validate` reads a plugin's class: hooks that would never run are named, without importing it (V46)."""

import re

import pytest

MANIFEST = """
schema = 1
name = "mine"
summary = "Mine"
plugin = "acme_mine.plugin:Mine"
stage = "adapters"
"""
CLASS = "error: the class acme_mine.plugin:Mine"
BASE = "import thunder_xform as tx\n\nclass Mine(tx.Plugin):\n"
HOOKS = (
    "The hooks are update_model_state, guard_key, mutate_prologue, before_autograd, after_optimization, "
    "invalidate_cache, sync_gradients, discard_gradients, export_state, import_state and gradient_norm."
)


@pytest.fixture
def validate(python, site, tmp_path):
    def run(source, *arguments):
        package = tmp_path / "src" / "acme_mine"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "manifest.toml").write_text(MANIFEST)
        (package / "plugin.py").write_text(source)
        done = python("-m", "thunder_xform.cli", "validate", str(tmp_path), *arguments, sites=(site,))
        assert done.stderr or done.returncode == 0
        return (done.stderr or done.stdout.partition("\n")[2]).strip()

    return run


CASES = {
    "not marked": (
        BASE + "    def before_autograd(self, computation):\n        return None\n",
        (
            f"{CLASS} has a method `before_autograd` that never runs, as it is not marked as "
            "a hook. Put @hookimpl above it."
        ),
    ),
    "misspelt": (
        BASE + "    @tx.hookimpl\n    def export_sate(self, state):\n        return state\n",
        (
            f"{CLASS} marks `export_sate` as a hook, but there is no hook of that name. Did "
            f"you mean 'export_state'? {HOOKS}"
        ),
    ),
    "an argument that is not given": (
        BASE + "    @tx.hookimpl\n    def export_state(self, states, ctx):\n        return states\n",
        (
            f"{CLASS} lets `export_state` take 'states', which that hook is not given. Did "
            "you mean 'state'? It is given state and ctx."
        ),
    ),
    "a wrapper that does not yield": (
        BASE + "    @tx.hookimpl(wrapper=True)\n    def export_state(self):\n        return {}\n",
        (
            f"{CLASS} marks `export_state` as a wrapper, but it does not yield. Let it yield "
            "once, and return what that gives."
        ),
    ),
    "no plugin": (
        "class Mine:\n    pass\n",
        f"{CLASS} is no subclass of thunder_xform.Plugin. Derive it from that class.",
    ),
    "no such class": (
        BASE.replace("Mine", "Mien") + "    pass\n",
        "error: `plugin` is 'acme_mine.plugin:Mine', but that module has no 'Mine'. Did you mean 'Mien'?",
    ),
    "neither marked nor well spelt": (
        BASE + "    def sync_gradient(self):\n        pass\n",
        (
            "warning: the class acme_mine.plugin:Mine has a method `sync_gradient`, which is no hook. Did you mean "
            "`sync_gradients`?"
        ),
    ),
    "all well": (
        BASE + "    @tx.hookimpl\n    def export_state(self, state):\n        return state\n\n"
        "    @staticmethod\n    @tx.hookimpl(wrapper=True)\n    def guard_key(ctx):\n        return (yield)\n",
        "",
    ),
    "made elsewhere": ("from os import path as Mine\n", ""),
}


@pytest.mark.parametrize(("source", "message"), CASES.values(), ids=CASES)
def test_v46_hooks_that_would_never_run(validate, source, message):
    assert validate(source) == message


def test_v46_what_only_an_import_tells(validate):
    source = "class Elsewhere:\n    pass\n\nclass Mine(Elsewhere):\n    pass\n"
    assert validate(source, "--imports") == (
        f"{CLASS} is no subclass of thunder_xform.Plugin. Derive it from that class."
    )


EFFECTS = (
    "params, params.set, params.shape, params.layout, params.dtype, params.device, params.requires_grad, params.data, "
    "buffers, buffers.set, buffers.shape, buffers.layout, buffers.dtype, buffers.device, buffers.requires_grad, "
    "buffers.data, trace, trace.compute, trace.collectives and trace.saved"
)


def test_v42_effects_that_do_not_exist(validate, tmp_path, monkeypatch):
    effects = {
        "reads": ["param.dtype", "params.dtype", "trace.compute.linear"],
        "writes": ["trace.savd", "model", "buffers.data", "trace.saved.linear"],
    }
    monkeypatch.setitem(globals(), "MANIFEST", f"{MANIFEST}effects = {toml(effects)}")
    hint = {
        "param.dtype": " Did you mean 'params.dtype'?",
        "trace.savd": " Did you mean 'trace.saved'?",
        "model": "",
        "trace.saved.linear": " Did you mean 'trace.saved'?",
    }
    assert validate(BASE + "    pass\n").splitlines() == [
        f"  error: `effects.{verb}` contains {state!r}, which there is not.{hint[state]} Use some of {EFFECTS}."[
            2 * (state == "param.dtype") :
        ]
        for verb in effects
        for state in effects[verb]
        if state in hint
    ]


def toml(table):
    return "{ " + ", ".join(f"{key} = {value!r}" for key, value in table.items()) + " }"


def test_the_effects_are_those_that_are_looked_at():
    """Those that the checks after a hook may find, from their source."""
    import inspect

    from thunder_xform.host import verify
    from thunder_xform.manifest import EFFECTS

    source = inspect.getsource(verify)
    found = set(re.findall(r'"(trace[.a-z_]*)"', source)) - {"trace.compute.linear"}
    parts = set(re.findall(r"{kind}\.([a-z_]+)", source)) | set(
        re.findall(r'\("([a-z_]+)", (?:old|old_layout)', source)
    )
    assert {f"{kind}.{part}" for kind in ("params", "buffers") for part in parts} | found | {
        "params",
        "buffers",
        "trace",
    } == set(EFFECTS)


PROJECTS = {
    "misspelt group": (
        '"thunder_xform.plugin"',
        "mine",
        "{project}: the entry-point group 'thunder_xform.plugin' is read by nothing. Call it 'thunder_xform.plugins'.",
    ),
    "misspelt entry point": (
        '"thunder_xform.plugins"',
        "mien",
        (
            "{project} announces 'mien', but not 'mine'. Write [project.entry-points.'thunder_xform.plugins'] with "
            "mine = 'package:manifest.toml'."
        ),
    ),
    "another group": (
        "pytest11",
        "mine",
        (
            "{project} does not announce 'mine'. Write [project.entry-points.'thunder_xform.plugins'] with "
            "mine = 'package:manifest.toml'."
        ),
    ),
    "all well": ('"thunder_xform.plugins"', "mine", ""),
}


@pytest.mark.parametrize(("group", "entry", "message"), PROJECTS.values(), ids=PROJECTS)
def test_v46_projects_that_do_not_announce_their_plugin(validate, tmp_path, group, entry, message):
    project = tmp_path / "pyproject.toml"
    project.write_text(f'[project]\nname = "x"\n[project.entry-points.{group}]\n{entry} = "acme_mine:manifest.toml"\n')
    assert validate(BASE + "    pass\n") == (message and f"error: {message}".format(project=project))
