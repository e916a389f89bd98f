"""An import only ever goes down, and only `host` touches Thunder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import thunder_xform

PACKAGE = Path(thunder_xform.__file__).parent
PLUGINS = Path(__file__).parent.parent / "plugins"

#: What each floor may import of the package.
FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "manifest": {"errors"},
    "registry": {"errors", "manifest"},
    "host": {"errors"},
    "parallel": {"errors", "host"},
    "checkpoint": {"errors", "host", "parallel"},
    "hookspecs": set(),
    "pipeline": {"errors", "hookspecs", "host", "parallel", "checkpoint"},
    "cli": {"errors", "manifest", "registry"},
}
#: The one upward arrow: the door that turns a resolution into a pipeline.
UPWARD = {("registry", "pipeline")}


def _imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Modules imported at run time, and whether at the top level."""
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in tree.body
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node in tree.body
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node in tree.body


def _sources(floor: str) -> list[Path]:
    module = PACKAGE / f"{floor}.py"
    return [module] if module.exists() else sorted((PACKAGE / floor).rglob("*.py"))


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_go_down(floor: str) -> None:
    sources = _sources(floor)
    assert sources
    for source in sources:
        for name, at_top in _imports(ast.parse(source.read_text())):
            parts = name.split(".")
            if parts[0] != "thunder_xform" or len(parts) < 2 or parts[1] == floor:
                continue
            if (floor, parts[1]) in UPWARD and not at_top:
                continue
            assert parts[1] in FLOORS[floor] or parts[1] not in FLOORS, f"{source.name} of {floor} imports {name}"


def test_only_host_imports_thunder() -> None:
    offenders = [
        f"{source.relative_to(PACKAGE)}: {name}"
        for source in sorted(PACKAGE.rglob("*.py"))
        # The command `doctor` reports on the installed Thunder; the test kit calls `thunder.jit` as a user does.
        if source.relative_to(PACKAGE).parts[0] not in ("host", "testing", "cli")
        for name, _ in _imports(ast.parse(source.read_text()))
        if name == "thunder" or name.startswith("thunder.")
    ]
    assert offenders == []


def test_the_registry_imports_no_torch_even_inside_functions() -> None:
    for source in _sources("registry"):
        for name, _ in _imports(ast.parse(source.read_text())):
            assert name.split(".")[0] not in ("torch", "thunder"), f"{source.name} imports {name}"


@pytest.mark.skipif(not PLUGINS.exists(), reason="the plugins' sources are not beside the tests")
def test_plugins_use_the_public_surface_only() -> None:
    public = set(thunder_xform.__all__) | {"testing"}
    sources = list(PLUGINS.glob("*/thunder_xform_*/**/*.py"))
    assert sources
    for source in sources:
        for name, _ in _imports(ast.parse(source.read_text())):
            parts = name.split(".")
            where = f"{source.relative_to(PLUGINS)} imports {name}"
            if parts[0] == "thunder_xform" and len(parts) > 1:
                assert parts[1] in public, where
                assert not any(part.startswith("_") for part in parts), where
                assert len(parts) <= 3, where
            elif parts[0] == "thunder":
                assert source.parts[-2] in ("thunder_xform_fabric", "thunder_xform_accelerate"), where
                assert parts[1:] in ([], ["jit"]), where
