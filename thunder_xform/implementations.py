"""Which hooks a class implements, and what keeps one from ever running."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from thunder_xform.errors import closest, spell
from thunder_xform.hookspecs import PROJECT, Hooks
from thunder_xform.plugin import Plugin

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


@dataclass(frozen=True, slots=True)
class Method:
    """A public method of a plugin's class."""

    name: str
    #: Whether it is marked as a hook, and as a wrapper of one.
    marked: bool
    wraps: bool
    #: The arguments that it cannot do without.
    required: tuple[str, ...]
    yields: bool


def faults(cls: type, *, observer: bool = False) -> Iterator[tuple[str, str]]:
    """What is wrong with the hooks of a plugin's class: problems, as phrases of which it is the subject, and remedies.

    Args:
        cls: the class.
        observer: it is that of an observer, which has wrappers alone.
    """
    if not observer and not issubclass(cls, Plugin):
        yield NO_PLUGIN
        return
    for method in _methods(cls):
        yield from method_faults(method, observer=observer)


NO_PLUGIN = "is no subclass of thunder_xform.Plugin", "Derive it from that class."


def method_faults(method: Method, *, observer: bool = False) -> Iterator[tuple[str, str]]:
    """What is wrong with one method, as :func:`faults` says it."""
    name = method.name
    if name not in HOOKS:
        if method.marked:
            problem = f"marks `{name}` as a hook, but there is no hook of that name"
            yield problem, f"{closest(name, HOOKS)} The hooks are {spell(HOOKS)}.".strip()
        return
    if not method.marked:
        yield f"has a method `{name}` that never runs, as it is not marked as a hook", "Put @hookimpl above it."
        return
    for argument in method.required:
        if argument not in HOOKS[name]:
            problem = f"lets `{name}` take {argument!r}, which that hook is not given"
            yield problem, f"{closest(argument, HOOKS[name])} It is given {spell(HOOKS[name])}.".strip()
    if method.wraps and not method.yields:
        yield f"marks `{name}` as a wrapper, but it does not yield", "Let it yield once, and return what that gives."
    if observer and not method.wraps:
        yield f"implements `{name}` instead of wrapping it", "Mark it with @hookimpl(wrapper=True)."


def near_misses(methods: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names of unmarked methods that may be meant for hooks, with those hooks."""
    for name in methods:
        near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)
        if near and name not in HOOKS:
            yield name, near[0]


def _methods(cls: type) -> Iterator[Method]:
    for name in sorted(dir(cls)):
        held = inspect.getattr_static(cls, name)
        function = getattr(held, "__func__", held)
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        marks = _marks(function)
        required = tuple(
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        )
        yield Method(
            name,
            marked=marks is not None,
            wraps=marks is not None and _wraps(marks),
            required=required if isinstance(held, staticmethod) else required[1:],
            yields=inspect.isgeneratorfunction(function),
        )


def _marks(method: Any) -> Any:
    return getattr(method, f"{PROJECT}_impl", None)


def _wraps(marks: Any) -> bool:
    return bool(marks["wrapper"] or marks["hookwrapper"])
