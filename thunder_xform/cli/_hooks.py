"""Read a plugin's class from its source: do its hooks run?"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from thunder_xform.errors import closest
from thunder_xform.implementations import NO_PLUGIN, Method, method_faults, near_misses
from thunder_xform.registry._files import module_file

__all__ = ["hook_errors", "hook_warnings"]


def hook_errors(target: str) -> Iterator[str]:
    """Why hooks of the class ``"module:Class"`` would never run, as far as its own source tells."""
    tree = _tree(target)
    name = target.partition(":")[2]
    found = _class(tree, name)
    if found is None:
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        if not _bound(tree, name):
            yield f"`plugin` is {target!r}, but that module has no {name!r}.{closest(name, classes)}"
        return
    faults = [fault for method in _methods(found) for fault in method_faults(method)]
    for problem, remedy in faults if found.bases else [NO_PLUGIN]:
        yield f"the class {target} {problem}. {remedy}"


def hook_warnings(target: str) -> Iterator[str]:
    """Methods of the class ``"module:Class"`` that may be meant for hooks."""
    found = _class(_tree(target), target.partition(":")[2])
    unmarked = [method.name for method in _methods(found) if not method.marked] if found else []
    for method, hook in near_misses(unmarked):
        yield f"the class {target} has a method `{method}`, which is no hook. Did you mean `{hook}`?"


def _tree(target: str) -> ast.Module:
    path = module_file(target.partition(":")[0])
    try:
        return ast.parse(path.read_bytes() if path else "")
    except (OSError, ValueError, SyntaxError):
        return ast.parse("")


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _bound(tree: ast.Module, name: str) -> bool:
    """Whether the module may bind `name` in some way; one whose source tells nothing may."""
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined = (ast.ClassDef, ast.FunctionDef)
    stored |= {node.name for node in ast.walk(tree) if isinstance(node, defined)}
    stored |= {
        (alias.asname or alias.name)
        for node in ast.walk(tree)
        for alias in getattr(node, "names", ())
        if isinstance(alias, ast.alias)
    }
    return not tree.body or not stored.isdisjoint((name, "*", "__getattr__"))


def _methods(cls: ast.ClassDef) -> Iterator[Method]:
    for node in cls.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        marks = {ast.unparse(getattr(d, "func", d)).rpartition(".")[2]: d for d in node.decorator_list}
        mark = marks.get("hookimpl")
        taken = [*node.args.posonlyargs, *node.args.args]
        required = [argument.arg for argument in taken[: len(taken) - len(node.args.defaults)]]
        yield Method(
            node.name,
            marked=mark is not None,
            wraps=mark is not None and "wrapper=True" in ast.unparse(mark),
            required=tuple(required if "staticmethod" in marks else required[1:]),
            yields=any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node)),
        )
