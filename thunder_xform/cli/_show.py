"""``thunder-xform show``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from thunder_xform.cli._list import record_data
from thunder_xform.cli._output import print_json, print_table, say
from thunder_xform.errors import printable
from thunder_xform.manifest import Manifest
from thunder_xform.registry import Record
from thunder_xform.registry._options import read_options
from thunder_xform.registry._registry import installed

__all__ = ["run"]

_EDGES = ("provides", "requires", "wants", "after", "before", "conflicts", "commutes")


def run(arguments: argparse.Namespace) -> int:
    """Print a plugin's declarations and options; its options class is read, not imported."""
    record, manifest = installed().catalog().get(arguments.name)
    fields = read_options(manifest.options) if manifest.options else ()
    if arguments.json:
        print_json({**record_data(record), "options": fields})
        return 0
    for label, value in _lines(record, manifest):
        say(f"{label + ':':<12} {printable(value)}")
    if fields is None:
        say(f"\nThe options are defined by {manifest.options}, which can only be read by importing it.")
    elif fields:
        print("\noptions:")
        rows = ((f.name, f.annotation, "(required)" if f.default is None else f.default, f.doc) for f in fields)
        print_table(("NAME", "TYPE", "DEFAULT", "MEANING"), rows, indent="  ")
    return 0


def _lines(record: Record, manifest: Manifest) -> Iterable[tuple[str, str]]:
    yield "name", record.name
    yield "summary", manifest.summary or "-"
    yield "from", record.origin
    yield "status", record.status
    yield "stage", manifest.stage or "none: a bundle, replaced by what it requires"
    for field in _EDGES:
        if value := getattr(manifest, field):
            yield field, ", ".join(value)
    for field in ("reads", "writes"):
        if value := getattr(manifest.effects, field):
            yield field, ", ".join(value)
    for resource, names in manifest.exclusive.items():
        yield "exclusive", f"{resource} per {', '.join(names)}" if names else resource
    for distribution, specifier in manifest.host.items():
        yield "host", f"{distribution} {specifier}"
    for name, presets in manifest.defaults.items():
        yield "defaults", f"{name}({_assignments(presets)})"


def _assignments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())
