"""`make isolated` installs each distribution alone, tests it, and says what failed."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture
def isolated(tmp_path, root, monkeypatch):
    """Run the tool in a small checkout: the commands that it would run, and whether it ended well."""
    spec = importlib.util.spec_from_file_location("isolated", root / "tools" / "isolated.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for plugin in "sharp", "flat":
        (tmp_path / "plugins" / plugin).mkdir(parents=True)
        (tmp_path / "plugins" / plugin / "pyproject.toml").touch()
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "HOME", tmp_path / "home")
    monkeypatch.setattr(tool, "WHEELS", tmp_path / "home" / "wheels")

    def run_tool(*arguments, failing=()):
        commands = []

        def run(*command, **environment):
            words = [str(word) for word in command]
            commands.append((words, environment))
            if "venv" in words:
                Path(words[-1]).mkdir(parents=True)
            return int(any(set(failure) <= set(words) for failure in failing))

        monkeypatch.setattr(tool, "run", run)
        monkeypatch.setattr("sys.argv", ["isolated.py", *arguments])
        try:
            tool.main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code
        return commands, code

    run_tool.home = tmp_path / "home"
    return run_tool


def test_each_in_an_environment_of_its_own(isolated):
    commands, code = isolated()
    assert code == 0
    installed = [(words[0], words[-1]) for words, _ in commands if "install" in words]
    assert installed == [
        (f"{isolated.home}/{name}/bin/python", f"{distribution}[test]")
        for name, distribution in [
            ("core", "thunder-xform"),
            ("flat", "thunder-xform-flat"),
            ("sharp", "thunder-xform-sharp"),
        ]
    ]
    for words, _ in commands:
        if "install" in words:
            assert words[words.index("-c") + 1].endswith("/constraints.txt")
            assert words[words.index("--find-links") + 1] == f"{isolated.home}/wheels"
    tested = [environment["THUNDER_XFORM_TEST_ONLY"] for words, environment in commands if "pytest" in words]
    assert tested == ["thunder-xform", "thunder-xform-flat", "thunder-xform-sharp"]
    assert [path.name for path in isolated.home.iterdir()] == [], "environments of tests that passed are removed"


def test_some_with_options_for_pytest(isolated):
    commands, _ = isolated("flat", "--", "-k", "one or two")
    ((words, environment),) = [command for command in commands if "pytest" in command[0]]
    assert words[1:3] == ["-m", "pytest"]
    assert words[3].endswith("/plugins/flat/tests")
    assert words[4:] == ["-k", "one or two"]
    assert environment["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize(
    ("step", "problem"),
    [("pytest", "pytest exited with status 1"), ("check", "its requirements cannot be installed")],
)
def test_a_failure_does_not_stop_the_others(isolated, capsys, step, problem):
    commands, code = isolated("flat", "sharp", failing=[(f"{isolated.home}/flat/bin/python", step)])
    assert code == 1
    assert [words[3].split("/")[-2] for words, _ in commands if "pytest" in words][-1] == "sharp"
    assert [path.name for path in isolated.home.iterdir()] == ["flat"], "left for the one who looks for the cause"
    report = capsys.readouterr().out.splitlines()[-2:]
    assert report[0].split(maxsplit=1)[1].startswith(problem)
    assert report[1].split() == ["sharp", "passed"]


def test_an_unknown_name_is_refused_before_anything_is_built(isolated, capsys):
    commands, code = isolated("shrap")
    assert (commands, code) == ([], 2)
    assert "'shrap' is no distribution of this repository. Choose from core, flat, sharp." in capsys.readouterr().err
