"""Read an options class from its source, so that options are known without importing the plugin."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thunder_xform.registry._files import module_file

if TYPE_CHECKING:
    import ast

__all__ = ["OptionField", "read_options"]


@dataclass(frozen=True, slots=True)
class OptionField:
    """One field of an options dataclass, as its source says."""

    name: str
    #: The annotation's source.
    annotation: str
    #: The default's source, or ``None`` where the option must be given.
    default: str | None
    #: The string that follows the field, or its ``#:`` comment.
    doc: str

    def default_value(self) -> Any:
        """The default where it is a literal, otherwise ``None``."""
        import ast

        try:
            return ast.literal_eval(self.default or "None")
        except (ValueError, SyntaxError):
            return None


@functools.cache
def read_options(target: str) -> tuple[OptionField, ...] | None:
    """The fields of the dataclass ``"module:Class"``.

    ``None`` where the source cannot tell: no source file, no plain dataclass, or base classes.
    """
    import ast

    module, _, name = target.partition(":")
    path = module_file(module)
    if path is None:
        return None
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name and not node.bases and _is_dataclass(node):
            return _fields(node, source.splitlines(), _aliases(tree))
    return None


def _is_dataclass(node: ast.ClassDef) -> bool:
    import ast

    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    return any(name.rpartition(".")[2] == "dataclass" for name in names)


def _aliases(tree: ast.Module) -> dict[str, ast.expr]:
    """Annotations that the module gives names, such as ``Dtype = Literal["float32", "bfloat16"]``."""
    import ast

    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _fields(node: ast.ClassDef, lines: list[str], aliases: dict[str, ast.expr]) -> tuple[OptionField, ...]:
    import ast

    fields = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation = _annotation(_resolved(statement.annotation, aliases))
        if annotation.rpartition(".")[2] == "KW_ONLY" or annotation.partition("[")[0].endswith("ClassVar"):
            continue
        default = _default(statement.value)
        if default is not _NOT_AN_OPTION:
            doc = _doc(statement, following, lines)
            fields.append(OptionField(statement.target.id, annotation, default, doc))
    return tuple(fields)


def _resolved(node: ast.expr, aliases: dict[str, ast.expr]) -> ast.expr:
    import ast
    import copy

    class Resolver(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return copy.deepcopy(aliases.get(name.id, name))

    resolved: ast.expr = Resolver().visit(copy.deepcopy(node)) if aliases else node
    return resolved


def _annotation(node: ast.expr) -> str:
    import ast

    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)


_NOT_AN_OPTION = "\0"


def _default(value: ast.expr | None) -> str | None:
    import ast

    if not (isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field"):
        return None if value is None else ast.unparse(value)
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    if isinstance(init := keywords.get("init"), ast.Constant) and init.value is False:
        return _NOT_AN_OPTION
    if "default_factory" in keywords:
        return f"{ast.unparse(keywords['default_factory'])}()"
    return ast.unparse(keywords["default"]) if "default" in keywords else None


def _doc(statement: ast.stmt, following: ast.stmt | None, lines: list[str]) -> str:
    import ast

    match following:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    comment: list[str] = []
    for line in reversed(lines[: statement.lineno - 1]):
        if not line.strip().startswith("#:"):
            break
        comment.insert(0, line.strip()[2:].strip())
    return " ".join(comment)
