"""The projects of this repository: the core and one a plugin."""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Project:
    path: Path
    pyproject: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.pyproject["project"]["name"])

    @property
    def package(self) -> str:
        return self.name.replace("-", "_")


def _projects() -> list[Project]:
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    found = [Project(file.parent, tomllib.loads(file.read_text("utf-8"))) for file in files]
    only = os.environ.get("THUNDER_XFORM_TEST_ONLY")  # Set by tools/isolated.py, which installs nothing else.
    return [project for project in found if only in (None, project.name)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "project" in metafunc.fixturenames:
        metafunc.parametrize("project", _projects(), ids=lambda project: project.name)


@pytest.fixture
def projects() -> list[Project]:
    return _projects()


@pytest.fixture
def root() -> Path:
    return ROOT
