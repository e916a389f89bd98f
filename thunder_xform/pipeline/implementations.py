"""Which hooks a class implements, and what keeps one from ever running."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

from thunder_xform.errors import closest, spell
from thunder_xform.hookspecs import PROJECT, Hooks
from thunder_xform.pipeline.plugin import Plugin

#: Every hook, with the arguments that an implementation may take.
HOOKS = {
    name: tuple(inspect.signature(spec).parameters)[1:]
    for name, spec in vars(Hooks).items()
    if not name.startswith("_")
}


class Implementations:
    """Methods of one plugin, by hook; an object of its own, as pluggy's manager compares objects by their ``==``."""

    def __init__(self, methods: dict[str, Any]) -> None:
        vars(self).update(methods)


def implementations(plugin: Any) -> tuple[Implementations, Implementations]:
    """The hooks that a plugin implements, and the wrappers around every plugin's."""
    own: dict[str, Any] = {}
    wrappers: dict[str, Any] = {}
    for name in HOOKS:
        method = getattr(plugin, name, None)
        if (marks := _marks(method)) is not None:
            (wrappers if _wraps(marks) else own)[name] = method
    return Implementations(own), Implementations(wrappers)


def faults(cls: type, *, observer: bool = False) -> Iterator[tuple[str, str]]:
    """What is wrong with the hooks of a plugin's class: problems, as phrases of which it is the subject, and remedies.

    Args:
        cls: the class.
        observer: it is that of an observer, which has wrappers alone.
    """
    if not observer and not issubclass(cls, Plugin):
        yield "is no subclass of thunder_xform.Plugin", "Derive it from that class."
        return
    for name in sorted(dir(cls)):
        method = inspect.getattr_static(cls, name)
        function = getattr(method, "__func__", method)
        if not inspect.isfunction(function) or name.startswith("_"):
            continue
        marks = _marks(function)
        if name not in HOOKS:
            if marks is not None:
                problem = f"marks `{name}` as a hook, but there is no hook of that name"
                yield problem, f"{closest(name, HOOKS)} The hooks are {spell(HOOKS)}.".strip()
        elif marks is None:
            yield f"has a method `{name}` that never runs, as it is not marked as a hook", "Put @hookimpl above it."
        else:
            yield from _signature_faults(name, method, marks, observer)


def near_misses(cls: type) -> Iterator[tuple[str, str]]:
    """Public methods of a plugin's class that may be meant for hooks: their names, and those of the hooks."""
    for name, method in sorted(vars(cls).items()):
        near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)
        if near and name not in HOOKS and inspect.isfunction(method) and _marks(method) is None:
            yield name, near[0]


def _signature_faults(name: str, method: Any, marks: Any, observer: bool) -> Iterator[tuple[str, str]]:
    function = getattr(method, "__func__", method)
    positional = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    for argument in positional if isinstance(method, staticmethod) else positional[1:]:
        if argument not in HOOKS[name]:
            problem = f"lets `{name}` take {argument!r}, which that hook is not given"
            yield problem, f"{closest(argument, HOOKS[name])} It is given {spell(HOOKS[name])}.".strip()
    if _wraps(marks) and not inspect.isgeneratorfunction(function):
        yield f"marks `{name}` as a wrapper, but it does not yield", "Let it yield once, and return what that gives."
    if observer and not _wraps(marks):
        yield f"implements `{name}` instead of wrapping it", "Mark it with @hookimpl(wrapper=True)."


def _marks(method: Any) -> Any:
    return getattr(method, f"{PROJECT}_impl", None)


def _wraps(marks: Any) -> bool:
    return bool(marks["wrapper"] or marks["hookwrapper"])
