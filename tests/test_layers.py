"""An import only ever goes down, and only `host` touches Thunder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
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
    "context": {"errors", "manifest", "host"},
    "patterns": {"context"},
    "hookspecs": {"context", "host"},
    "plugin": set(),
    "implementations": {"errors", "hookspecs", "plugin"},
    "checkpoint": {"errors", "context", "host", "parallel"},
    "pipeline": {
        *("errors", "registry", "context", "hookspecs", "plugin", "implementations"),
        *("host", "parallel", "checkpoint"),
    },
    "cli": {"errors", "manifest", "registry", "hookspecs", "implementations"},
}
#: The one upward arrow: the door that turns a resolution into a pipeline.
UPWARD = {("registry", "pipeline")}


def _imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Modules imported, also for the names of types alone, and whether at the top level."""
    for node in ast.walk(tree):
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


def test_no_file_imports_itself_through_others() -> None:
    """Not for the names of types either, and not through the door."""

    def module(source: Path) -> str:
        parts = ("thunder_xform", *source.relative_to(PACKAGE).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    modules = {module(source): ast.parse(source.read_text()) for source in PACKAGE.rglob("*.py")}
    graph = {name: {found for found, _ in _imports(tree)} & modules.keys() - {name} for name, tree in modules.items()}
    for name, tree in modules.items():
        # `from package import module` takes the module; the package itself only if another name is taken.
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and all(f"{node.module}.{a.name}" in modules for a in node.names):
                graph[name].discard(node.module or "")
    list(TopologicalSorter(graph).static_order())


def test_only_host_imports_thunder() -> None:
    offenders = [
        f"{source.relative_to(PACKAGE)}: {name}"
        for source in sorted(PACKAGE.rglob("*.py"))
        # The package names `thunder.torch` as `ops`; the command `doctor` reports on the installed Thunder; the test
        # kit calls `thunder.jit` as a user does.
        if source.relative_to(PACKAGE).parts[0] not in ("__init__.py", "host", "testing", "cli")
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
