"""Plugins that exist in memory only, and installed ones in folders of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import thunder_xform
from thunder_xform.manifest import Effects, Manifest
from thunder_xform.registry import Record, Registry

Fields = dict[str, Any]


def _record(name: str, stage: str | None = "adapters", *, version: str = "1.0", **fields: Any) -> Record:
    """A usable record; `fields` are those of the manifest, ``reads`` and ``writes`` short for ``effects``."""
    distribution = fields.pop("distribution", f"dist-{name}")
    effects = Effects(fields.pop("reads", ()), fields.pop("writes", ()))
    plugin = None if stage is None else f"no_such_package_{name}:Plugin"
    manifest = Manifest(name=name, stage=stage, **{"plugin": plugin, "effects": effects, **fields})
    return Record(name=name, distribution=distribution, version=version, manifest=manifest)


@pytest.fixture(scope="session")
def record() -> Callable[..., Record]:
    return _record


@pytest.fixture(scope="session")
def registry() -> Callable[..., Registry]:
    """A sealed registry: positional arguments are records, keywords give a name and its fields."""

    def make(*records: Record, environ: dict[str, str] | None = None, **named: Fields) -> Registry:
        return Registry([*records, *(_record(name, **fields) for name, fields in named.items())], environ=environ)

    return make


class Site:
    """A folder like ``site-packages`` to install made-up distributions into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)

    def install(
        self,
        name: str,
        manifest: str | None = None,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        package: str | None = None,
        files: dict[str, str] | None = None,
        entry_points: str | None = None,
    ) -> Path:
        """Install one plugin and return its package's folder; a ``None`` manifest leaves a minimal one."""
        distribution = distribution or f"thunder-xform-{name}"
        package = package or f"thunder_xform_{name}"
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        entry_points = entry_points or f"[thunder_xform.plugins]\n{name} = {package}:manifest.toml\n"
        (info / "entry_points.txt").write_text(entry_points)
        folder = self.path / package
        folder.mkdir(exist_ok=True)
        contents = {
            # Importing any of them leaves a trace that the tests look for.
            "__init__.py": f"import sys; sys.modules['imported_{name}'] = sys",
            "plugin.py": "import thunder_xform as tx\n\nclass Plugin(tx.Plugin):\n    pass\n",
            "manifest.toml": minimal(name, package) if manifest is None else manifest,
            **(files or {}),
        }
        for file, text in contents.items():
            (folder / file).write_text(text)
        return folder


def minimal(name: str, package: str | None = None, stage: str = "adapters", more: str = "") -> str:
    """The text of a small valid manifest."""
    plugin = f"{package or f'thunder_xform_{name}'}.plugin:Plugin"
    return f'schema = 1\nname = "{name}"\nplugin = "{plugin}"\nstage = "{stage}"\n{more}'


@pytest.fixture(scope="session")
def manifest_text() -> Callable[..., str]:
    return minimal


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


@pytest.fixture
def make_site(tmp_path: Path) -> Callable[[str], Site]:
    return lambda name: Site(tmp_path / name)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this package and what the registry needs: no torch, no Thunder, no other plugin."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "thunder_xform").symlink_to(Path(thunder_xform.__file__).parent)
    needed, seen = ["importlib-metadata", "packaging", "pluggy"], set()
    while needed:
        if (name := needed.pop()) in seen:
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()}:
            if not top.endswith(".dist-info") and top not in ("..", "__pycache__"):
                (folder / top).symlink_to(distribution.locate_file(top))
        requirements = map(Requirement, distribution.requires or ())
        needed += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return folder


@pytest.fixture(scope="session")
def python(bare: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with `sites` and the bare folder as its only packages."""

    def run(*arguments: str, sites: tuple[Site, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "THUNDER_XFORM_"))}
        paths = os.pathsep.join(str(path) for path in (*(site.path for site in sites), bare))
        return subprocess.run(
            [sys.executable, "-S", "-P", *arguments],
            env={**inherited, "PYTHONPATH": paths, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def evaluate(python: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Any]:
    """The JSON value that `code` assigns to ``result`` in a fresh process, with ``registry`` imported."""

    def run(code: str, *sites: Site, **environ: str) -> Any:
        script = f"import json, sys\nfrom thunder_xform import registry\n{code}\nprint(json.dumps(result))"
        done = python("-c", script, sites=sites, **environ)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
