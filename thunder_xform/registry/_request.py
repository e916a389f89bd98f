"""The forms of a request, brought to one: plugin name -> what the caller asked of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thunder_xform.errors import DuplicateRequestError, RequestSyntaxError
from thunder_xform.registry._catalog import Catalog
from thunder_xform.registry._text import parse, type_name

__all__ = ["Wish", "canonical", "read_request", "same"]


@dataclass(frozen=True, slots=True)
class Wish:
    """One requested plugin."""

    name: str
    #: The options given.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Those of them that come from an options instance and equal the class's default.
    defaulted: frozenset[str] = frozenset()
    #: The plugin object itself, where the caller made one.
    instance: object | None = None


def read_request(request: object, catalog: Catalog) -> dict[str, Wish]:
    """The wishes of `request`, by name.

    Raises:
        RequestSyntaxError: an item has none of the accepted forms.
        DuplicateRequestError: two items mean one plugin.
        UnknownNameError: an object belongs to no installed plugin.
    """
    wishes: dict[str, Wish] = {}
    for item in _items(request):
        for wish in _wishes(item, catalog):
            if wish.name in wishes:
                raise DuplicateRequestError(
                    f"{wish.name!r} is requested twice.",
                    "Name each plugin once; all its options go into that one place.",
                    name=wish.name,
                    option="",
                )
            wishes[wish.name] = wish
    return wishes


def canonical(value: Any) -> Any:
    """The value with lists as tuples, all the way down, so that equal requests compare equal."""
    match value:
        case tuple() | list() if type(value) in (tuple, list):
            return tuple(map(canonical, value))
        case dict():
            return {key: canonical(entry) for key, entry in value.items()}
    return value


def same(a: object, b: object) -> bool:
    """Equality of type and value that an exotic ``==`` cannot break."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


def _items(request: object) -> Iterable[object]:
    if isinstance(request, tuple) and _is_pair(request):
        return (request,)
    return request if isinstance(request, list | tuple) else (request,)


def _is_pair(item: tuple[object, ...]) -> bool:
    return len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Mapping)


def _wishes(item: object, catalog: Catalog) -> list[Wish]:
    if isinstance(item, str):
        return [Wish(name, canonical(options)) for name, options in parse(item)]
    if isinstance(item, tuple) and _is_pair(item):
        return [Wish(str(item[0]), canonical(dict(item[1])))]
    if isinstance(item, type) or item is None or isinstance(item, (bool, int, float, bytes, list, tuple, Mapping)):
        raise RequestSyntaxError(
            f"a request item may not be {item!r}.",
            "Give a name, a pair (name, options), an options instance, or a plugin instance.",
        )
    return [_from_object(item, catalog)]


def _from_object(item: object, catalog: Catalog) -> Wish:
    if found := catalog.owner(type(item), "options"):
        return Wish(found[0].name, *_field_values(item))
    if found := catalog.owner(type(item), "plugin"):
        options = getattr(item, "options", None)
        known = found[1].options and catalog.owner(type(options), "options")
        values, defaulted = _field_values(options) if known else ({}, frozenset())
        return Wish(found[0].name, values, defaulted, instance=item)
    raise RequestSyntaxError(
        f"an object of type {type_name(item)} belongs to no installed plugin.",
        "Name its class as `plugin` or `options` in the manifest of an installed distribution.",
    )


def _field_values(options: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """All fields of an options dataclass, and which of them have their default."""
    values: dict[str, Any] = {}
    defaulted = set()
    for entry in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
        if not entry.init:
            continue
        value = values[entry.name] = getattr(options, entry.name)
        factory = entry.default_factory
        default = entry.default if factory is dataclasses.MISSING else factory()
        if same(value, default):
            defaulted.add(entry.name)
    return {key: canonical(value) for key, value in values.items()}, frozenset(defaulted)
