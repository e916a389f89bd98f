"""Every distribution is installed from a wheel that holds what the source tree holds; the tests import it."""

import importlib.util
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

GROUP = "thunder_xform.plugins"


def test_imports_come_from_site_packages(project):
    spec = importlib.util.find_spec(project.package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).parent.parent == Path(sysconfig.get_path("purelib"))


def test_wheel_holds_the_package_and_nothing_else(project):
    distribution = metadata.distribution(project.name)
    assert distribution.files is not None
    owned = {project.package, f"{project.package}-{distribution.version}.dist-info"}
    declared = project.pyproject["project"].get("scripts", {})
    scripts = {Path(sysconfig.get_path("scripts"), name) for name in declared}
    for file in distribution.files:
        assert file.parts[0] in owned or Path(file.locate()).resolve() in scripts, file


def test_installed_files_are_the_source_files(project):
    """Guards against a stale environment and against a data file that the wheel forgot."""
    installed = Path(sysconfig.get_path("purelib"), project.package)
    assert _contents(installed) == _contents(project.path / project.package)


def test_package_is_typed(project):
    assert Path(sysconfig.get_path("purelib"), project.package, "py.typed").is_file()


def test_entry_points_name_a_manifest_in_the_package(project):
    declared = project.pyproject["project"].get("entry-points", {}).get(GROUP, {})
    points = metadata.distribution(project.name).entry_points.select(group=GROUP)
    assert {point.name: point.value for point in points} == declared
    for name, value in declared.items():
        package, _, file = value.partition(":")
        assert package == project.package
        manifest = Path(sysconfig.get_path("purelib"), package, file)
        assert tomllib.loads(manifest.read_text("utf-8"))["name"] == name


def test_versions_move_together(project, root):
    core = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert metadata.version(project.name) == core


def test_license_ships(project, root):
    distribution = metadata.distribution(project.name)
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    assert distribution.read_text("licenses/LICENSE") == (root / "LICENSE").read_text("utf-8")


def _contents(package: Path) -> dict[str, bytes]:
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(package).as_posix(): path.read_bytes() for path in files}
