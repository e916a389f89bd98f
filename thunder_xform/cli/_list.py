"""``thunder-xform list``."""

from __future__ import annotations

import argparse
from typing import Any

from thunder_xform import registry
from thunder_xform.cli._output import error_data, print_json, print_table, say

__all__ = ["record_data", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Print a line per announced plugin, and a line more for each that cannot be used."""
    records = registry.list(allow=arguments.allow, deny=arguments.deny)
    if arguments.json:
        print_json([record_data(record) for record in records])
        return 0
    if not records:
        print("No plugins are installed. Try: pip install thunder-xform-lora")
        return 0
    print_table(("NAME", "STATUS", "STAGE", "DISTRIBUTION", "VERSION", "SUMMARY"), map(_row, records))
    for record in records:
        if record.error is not None and record.status != "denied":
            say(f"\n{record.name} [{record.origin}] is {record.status}: {record.error}")
        for other in record.shadowed:
            say(f"\n{record.name} [{record.origin}] hides {record.distribution} {other}")
    return 0


def record_data(record: registry.Record) -> dict[str, Any]:
    """A record as JSON data."""
    return {
        "name": record.name,
        "status": record.status,
        "distribution": record.distribution,
        "version": record.version,
        "entry_point": record.entry_point,
        "shadowed": record.shadowed,
        "manifest": record.manifest,
        "error": error_data(record.error),
    }


def _row(record: registry.Record) -> tuple[object, ...]:
    stage, summary = (record.manifest.stage, record.manifest.summary) if record.manifest else (None, None)
    return record.name, record.status, stage, record.distribution, record.version, summary
