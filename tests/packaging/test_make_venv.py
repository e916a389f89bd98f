"""`make setup` does the least that makes .venv match the sources."""

import importlib.util
import shutil

import pytest

CORE, PLUGIN = "thunder_xform-0.1.0-py3-none-any.whl", "thunder_xform_demo-0.1.0-py3-none-any.whl"


@pytest.fixture
def checkout(tmp_path, root, monkeypatch):
    """A small checkout whose commands are recorded, not run; only `pip wheel` leaves the files it would."""
    spec = importlib.util.spec_from_file_location("make_venv", root / "tools" / "make_venv.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for folder, package in (tmp_path, "thunder_xform"), (tmp_path / "plugins" / "demo", "thunder_xform_demo"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("")
        (folder / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    commands = []

    def run(*command):
        words = [str(word) for word in command]
        commands.append(words)
        if "venv" in words:
            tool.VENV.mkdir(exist_ok=True)
        if "wheel" in words:
            folder = words[words.index("-w") + 1]
            for project in (word for word in words if word.startswith(str(tmp_path)) and word != words[0]):
                shutil.copy(tmp_path / "constraints.txt", f"{folder}/{PLUGIN if 'demo' in project else CORE}")

    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(tool, "STAMP", tmp_path / ".venv" / "installed.json")
    monkeypatch.setattr(tool, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(tool, "run", run)

    def setup():
        commands.clear()
        tool.main()
        return [_verb(words) for words in commands]

    setup.tool, setup.root = tool, tmp_path
    return setup


def _verb(words):
    wheels = [word.rsplit("/", 1)[-1] for word in words if ".whl" in word or "==" in word]
    verb = next(word for word in words if word in {"venv", "wheel", "install", "check"})
    return " ".join([verb, *(["resolve"] if "-c" in words else []), *wheels])


def test_first_run_resolves_everything_at_once(checkout):
    assert checkout() == [
        "venv",
        "install resolve",
        "wheel",
        "install resolve thunder_xform[dev]==0.1.0 thunder_xform_demo[test]==0.1.0",
        f"install {CORE} {PLUGIN}",
        "check",
    ]


def test_nothing_changed_does_nothing(checkout):
    checkout()
    assert checkout() == []


def test_changed_source_rebuilds_that_wheel_only(checkout):
    checkout()
    (checkout.root / "plugins/demo/thunder_xform_demo/__init__.py").write_text("x = 1\n")
    assert checkout() == ["wheel", f"install {PLUGIN}", "check"]


def test_deleted_source_is_a_change(checkout):
    (checkout.root / "thunder_xform" / "old.py").write_text("")
    checkout()
    (checkout.root / "thunder_xform" / "old.py").unlink()
    assert checkout() == ["wheel", f"install {CORE}", "check"]


def test_changed_pin_resolves_again_in_the_same_venv(checkout):
    checkout()
    (checkout.root / "constraints.txt").write_text("torch==2.13.1\n")
    verbs = checkout()
    assert "venv" not in verbs
    assert "install resolve thunder_xform[dev]==0.1.0 thunder_xform_demo[test]==0.1.0" in verbs


def test_removed_plugin_starts_over(checkout):
    checkout()
    shutil.rmtree(checkout.root / "plugins" / "demo")
    assert checkout()[0] == "venv"


@pytest.mark.parametrize("changed", ["thunder_xform/__init__.py", "constraints.txt"])
def test_interrupted_run_is_finished_by_the_next_one(checkout, monkeypatch, changed):
    checkout()
    (checkout.root / changed).write_text("torch==2.13.1\n")

    def fail(*_):
        raise SystemExit("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(checkout.tool, "run", fail)
        with pytest.raises(SystemExit):
            checkout.tool.main()
    verbs = checkout()
    assert verbs[-1] == "check"
    assert "venv" not in verbs
    assert checkout() == []
