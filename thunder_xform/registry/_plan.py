"""From a request to a resolution, without importing plugin code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thunder_xform.errors import (
    ConflictError,
    DuplicateRequestError,
    ManifestError,
    RequestSyntaxError,
    UnknownNameError,
    UnknownOptionError,
    closest,
    spell,
)
from thunder_xform.manifest import Manifest
from thunder_xform.registry._catalog import Catalog
from thunder_xform.registry._checks import check_conflicts, check_effects, check_exclusive
from thunder_xform.registry._options import read_options
from thunder_xform.registry._order import Graph
from thunder_xform.registry._record import Record
from thunder_xform.registry._request import Wish, canonical, read_request, same
from thunder_xform.registry._select import Selection
from thunder_xform.registry._values import convert_option, static_hint
from thunder_xform.registry.resolution import Resolution
from thunder_xform.registry.step import Step

__all__ = ["make_plan"]


def make_plan(
    request: object,
    catalog: Catalog,
    options: Mapping[str, Mapping[str, Any]] | None,
    edges: Iterable[tuple[str, str]],
) -> Resolution:
    """The resolution of `request` among the plugins of `catalog`; raises as `Registry.plan` documents."""
    wishes = read_request(request, catalog)
    selection = Selection(wishes, catalog)
    given = _given(options or {}, wishes, selection)
    presets = _presets(selection)
    steps = []
    for name, (record, manifest) in selection.plugins.items():
        wish = wishes.get(name, Wish(name))
        values = {**presets.get(name, {}), **wish.options, **given.get(name, {})}
        for key in wish.defaulted - presets.get(name, {}).keys():
            del values[key]
        _check_names(record, manifest, values)
        values = _convert(record, manifest, values)
        steps.append(
            Step(
                name=name,
                distribution=record.distribution,
                version=record.version,
                entry_point=record.entry_point,
                manifest=manifest,
                options=dict(sorted(values.items())),
                reason=selection.reason(name),
                instance=wish.instance,
                packages=record.packages,
            )
        )
    user_edges = tuple(_read_edge(edge, catalog) for edge in edges)
    check_conflicts(steps)
    check_exclusive(steps)
    graph = Graph(steps, user_edges)
    order = graph.order()
    check_effects(steps, graph)
    position = {name: i for i, name in enumerate(order)}
    return Resolution(tuple(sorted(steps, key=lambda step: position[step.name])), user_edges)


def _read_edge(edge: object, catalog: Catalog) -> tuple[str, str]:
    match edge:
        case (str(first), str(then)):
            for pattern in (first, then):
                if not catalog.means_something(pattern):
                    raise catalog.unknown(pattern)
            return first, then
    raise RequestSyntaxError(
        f"edges= contains {edge!r}.", "Each edge is a pair (first, then) of names or capabilities."
    )


def _given(
    options: Mapping[str, Mapping[str, Any]], wishes: Mapping[str, Wish], selection: Selection
) -> dict[str, dict[str, Any]]:
    """The ``options=`` argument, after checking that it fits the request."""
    for name, values in options.items():
        if not isinstance(values, Mapping):
            raise RequestSyntaxError(
                f"options= gives {name!r} {values!r}.", "Give it a mapping, such as {'lora': {'r': 8}}."
            )
    with_options = [name for name, wish in wishes.items() if wish.options]
    for name in dict.fromkeys((*with_options, *options)):
        if name in selection.bundles:
            members = spell(selection.bundles[name][1].requires)
            raise UnknownNameError(
                f"options are given for {name!r}, which is a bundle and has none of its own.",
                f"Give them for what it stands for: {members}.",
                name=name,
                known=tuple(selection.plugins),
            )
        if name not in selection.plugins:
            hint = closest(name, selection.plugins)
            raise UnknownNameError(
                f"options are given for {name!r}, which is not in the pipeline.{hint}",
                f"It consists of {spell(selection.plugins)}." if selection.plugins else "It is empty.",
                name=name,
                known=tuple(selection.plugins),
            )
    given = {name: canonical(dict(values)) for name, values in options.items()}
    for name, values in given.items():
        _check_once(wishes.get(name, Wish(name)), values)
    return given


def _check_once(wish: Wish, values: Mapping[str, Any]) -> None:
    """Raise `DuplicateRequestError` if `values` contradict what the request says of the plugin already."""
    for key, value in values.items():
        if wish.instance is not None:
            held = "set by the plugin instance"
        elif key in wish.options and not same(wish.options[key], value):
            held = f"{wish.options[key]!r} in the request"
        else:
            continue
        raise DuplicateRequestError(
            f"the option {key!r} of {wish.name!r} is {held} and {value!r} in options=.",
            "Give it in one place.",
            name=wish.name,
            option=key,
        )


def _presets(selection: Selection) -> dict[str, dict[str, Any]]:
    """The defaults that bundles set for other plugins, checked against those plugins' options."""
    presets: dict[str, dict[str, Any]] = {}
    source: dict[tuple[str, str], Record] = {}
    for bundle, manifest in selection.bundles.values():
        for name, values in manifest.defaults.items():
            if name not in selection.plugins:
                continue
            _check_preset(bundle, *selection.plugins[name], values)
            for key, value in canonical(dict(values)).items():
                other = source.setdefault((name, key), bundle)
                if not same(presets.setdefault(name, {}).setdefault(key, value), value):
                    claims = tuple(f"{b.origin}: defaults.{name}.{key}" for b in (other, bundle))
                    raise ConflictError(
                        f"{other.name!r} presets {key} = {presets[name][key]!r} for {name!r}, "
                        f"and {bundle.name!r} presets {value!r} [{'; '.join(claims)}].",
                        "Leave out one of them, and request what it stands for instead.",
                        names=(other.name, bundle.name),
                        claims=claims,
                    )
    return presets


def _check_preset(bundle: Record, record: Record, manifest: Manifest, values: Mapping[str, Any]) -> None:
    try:
        _check_names(record, manifest, values)
    except UnknownOptionError as error:
        raise ManifestError(
            f"`defaults.{record.name}` sets {error.option!r}, but {error.problem}",
            error.remedy,
            file=bundle.entry_point.replace(":", "/") or "the manifest",
            field=f"defaults.{record.name}",
            distribution=bundle.origin,
        ) from None


def _convert(record: Record, manifest: Manifest, values: dict[str, Any]) -> dict[str, Any]:
    """The values as the source of the options class annotates them."""
    fields = (read_options(manifest.options) if manifest.options and values else None) or ()
    hints = {field.name: static_hint(field.annotation) for field in fields if field.name in values}
    return {
        key: convert_option(record.name, record.origin, key, value, hints[key]) if key in hints else value
        for key, value in values.items()
    }


def _check_names(record: Record, manifest: Manifest, values: Mapping[str, Any]) -> None:
    """Raise `UnknownOptionError` for a name that the options class, read from its source, does not have."""
    fields = read_options(manifest.options) if manifest.options else ()
    for key in values:
        unreadable = fields is None and isinstance(key, str) and key.isidentifier()
        if not unreadable and key not in (known := [field.name for field in fields or ()]):
            raise UnknownOptionError(plugin=record.name, distribution=record.origin, option=str(key), known=known)
