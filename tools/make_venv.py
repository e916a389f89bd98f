"""Create or refresh .venv: core and every plugin as built wheels, with the pinned tools of constraints.txt.

Run by `make setup`; needs Python 3.11 or newer with pip, and nothing else. What was installed is recorded by
content hash, so a second run does nothing, and a change in a package's sources rebuilds that wheel only.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "installed.json"
CONSTRAINTS = ROOT / "constraints.txt"


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - the machine's Python, not the project's
        sys.exit(
            f"thunder-xform needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=python3.12 ..."
        )
    started = time.monotonic()
    projects = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
    wanted: dict[str, Any] = {
        "python": sys.version,
        "requirements": digest([CONSTRAINTS, *(project / "pyproject.toml" for project in projects)]),
        "wheels": {key(project): digest(sources(project)) for project in projects},
    }
    installed = read_stamp()
    if installed == wanted:
        return
    known = installed.get("wheels", {})
    fresh = installed.get("python") != wanted["python"] or not known.keys() <= wanted["wheels"].keys()
    resolve = fresh or installed["requirements"] != wanted["requirements"]
    kept = {k: v for k, v in known.items() if v == wanted["wheels"].get(k) and not resolve}
    stale = [project for project in projects if key(project) not in kept]

    if fresh:
        run(sys.executable, "-m", "venv", "--clear", VENV)
    # What is about to change is taken off the record first: an interrupted run must not look finished.
    record(wanted | {"wheels": kept} | ({"requirements": None} if resolve else {}))
    if resolve:
        pip("install", "-c", CONSTRAINTS, "hatchling")
    with tempfile.TemporaryDirectory() as folder:
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, *stale)
        wheels = sorted(Path(folder).glob("*.whl"))
        if resolve:
            # One resolution over everything, so that no requirement is seen without torch's pin.
            pip("install", "-c", CONSTRAINTS, "--find-links", folder, *map(requirement, wheels))
        pip("install", "--no-deps", "--force-reinstall", *wheels)  # pip skips a wheel of a version it has
    pip("check")
    record(wanted)
    print(f"Installed {', '.join(wheel.name for wheel in wheels)} in {time.monotonic() - started:.0f} s")


def key(project: Path) -> str:
    return str(project.relative_to(ROOT))


def sources(project: Path) -> list[Path]:
    """The files that go into a project's wheel."""
    packages = project.glob("thunder_xform*")
    modules = (path for package in packages for path in package.rglob("*") if "__pycache__" not in path.parts)
    return [project / "pyproject.toml", project / "README.md", project / "LICENSE", *modules]


def digest(paths: list[Path], salt: str = "") -> str:
    state = hashlib.sha256(salt.encode())
    for path in sorted(path for path in paths if path.is_file()):
        content = path.read_bytes()
        state.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return state.hexdigest()


def requirement(wheel: Path) -> str:
    """By name, because plugins ask for extras of each other, which pip does not look for in a wheel given as a file.

    The core's `dev` brings the tools and the demo's needs, a plugin's `test` what its tests need.
    """
    name, version, *_ = wheel.name.split("-")
    return f"{name}[{'dev' if name == 'thunder_xform' else 'test'}]=={version}"


def read_stamp() -> dict[str, Any]:
    try:
        return dict(json.loads(STAMP.read_text()))
    except (OSError, ValueError):
        return {}


def record(state: dict[str, Any]) -> None:
    STAMP.write_text(json.dumps(state, indent=2) + "\n")


def pip(*arguments: str | Path) -> None:
    run(VENV / "bin" / "python", "-m", "pip", *arguments, "--disable-pip-version-check", "-qq")


def run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"make setup stopped: the command above exited with status {done.returncode}.")


if __name__ == "__main__":
    main()
