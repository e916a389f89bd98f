"""Run each distribution's tests where nothing is installed but its wheel, what it requires, and its extra `test`.

    python tools/isolated.py                         every distribution
    python tools/isolated.py ddp fabric              some: names of plugins, or core
    python tools/isolated.py ddp -- -x -k buckets    the rest goes to pytest

Run by `make isolated`, with the Python of .venv, which has what builds wheels. Each distribution gets a virtual
environment of its own, installed with constraints.txt and removed when its tests have passed. A requirement that is
used and not declared, and a test that needs a plugin it does not ask for, fail here and nowhere else.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".isolated"
WHEELS = HOME / "wheels"
#: Tells the tests of the core, some of which look at every distribution, that only this one is there.
ONLY = "THUNDER_XFORM_TEST_ONLY"


def main() -> None:
    plugins = [path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    projects = {"core": ROOT} | {plugin.name: plugin for plugin in plugins}
    parser = argparse.ArgumentParser(description="Run each distribution's tests with its own requirements only.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(projects)}; by default all")
    own, pytest_arguments = split(sys.argv[1:])
    names = parser.parse_args(own).names or list(projects)
    if unknown := [name for name in names if name not in projects]:
        parser.error(f"{unknown[0]!r} is no distribution of this repository. Choose from {', '.join(projects)}.")

    build(list(projects.values()))
    results = {name: test(name, projects[name], pytest_arguments) for name in names}
    print("\nWith its own requirements only:")
    for name, result in results.items():
        print(f"  {name:12} {result or 'passed'}")
    if any(results.values()):
        sys.exit(1)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """This tool's arguments, and pytest's, which follow ``--``."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def build(projects: list[Path]) -> None:
    shutil.rmtree(WHEELS, ignore_errors=True)
    options = ("-qq", "--no-deps", "--no-build-isolation", "-w", WHEELS)
    if run(sys.executable, "-m", "pip", "wheel", *options, *projects):
        sys.exit("The wheels could not be built.")


def test(name: str, project: Path, pytest_arguments: list[str]) -> str:
    """What went wrong; nothing if the tests passed."""
    started = time.monotonic()
    venv = HOME / name
    python = venv / "bin" / "python"
    distribution = "thunder-xform" if name == "core" else f"thunder-xform-{name}"
    print(f"\n== {distribution}", flush=True)
    if run(sys.executable, "-m", "venv", "--clear", venv):
        return "no virtual environment"
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    resolve = ("-qq", "-c", ROOT / "constraints.txt", "--find-links", WHEELS)
    if run(*pip, "install", *resolve, f"{distribution}[test]") or run(*pip, "check"):
        return f"its requirements cannot be installed; see {venv}"
    print(f"installed in {time.monotonic() - started:.0f} s:", flush=True)
    run(*pip, "list", "--format=freeze")
    # As in the Makefile: only what is installed can be imported, in the processes that tests start, too.
    environment = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", ONLY: distribution}
    status = run(python, "-m", "pytest", project / "tests", *pytest_arguments, **environment)
    if status:
        return f"pytest exited with status {status}; its environment is {venv}"
    shutil.rmtree(venv)
    return ""


def run(*command: str | Path, **environment: str) -> int:
    return subprocess.run([*map(str, command)], cwd=ROOT, env=os.environ | environment, check=False).returncode


if __name__ == "__main__":
    main()
