"""Runs the examples as a user would: scripts in processes of their own, against the installed packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def examples(monkeypatch):
    """The folder of the examples; their modules can be imported while the test runs."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield EXAMPLES
    for path in EXAMPLES.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


@pytest.fixture(scope="session")
def run_python():
    """Run Python with arguments; returns the completed process, both outputs as text."""

    def run(*arguments, timeout=240):
        # Scripts import their neighbours, which safe-path mode forbids.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command,
            env=environment | {"COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def torchrun(run_python):
    """Run train.py on two ranks."""

    def run(*arguments):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=0", "--nproc-per-node=2")
        return run_python(*launcher, EXAMPLES / "train.py", *arguments)

    return run
