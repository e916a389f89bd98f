"""``thunder-xform doctor``."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

from thunder_xform import registry
from thunder_xform.cli._output import print_json, say
from thunder_xform.errors import XformError
from thunder_xform.registry._host import installed_version

__all__ = ["run"]

#: The versions with which this release was tested; see CHANGELOG.md.
_TESTED = {"torch": "2.13.0", "lightning-thunder": "0.2.6"}


@dataclass(frozen=True, slots=True)
class _Finding:
    """One line of the report; `level` is ``ok``, ``note`` or ``problem``."""

    topic: str
    level: str
    text: str


def run(arguments: argparse.Namespace) -> int:
    """Print the state of everything a pipeline runs on, and of a model if one is named; 1 if there is a problem."""
    findings = [*_versions(), *_torch(), *_thunder(), *_plugins(), *_model(arguments)]
    if os.environ.get("RANK", "0") != "0":
        pass  # Under torchrun all ranks find the same.
    elif arguments.json:
        print_json(findings)
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            say(f"{finding.level:<8} {finding.topic:<{width}}  {finding.text}")
    return int(any(finding.level == "problem" for finding in findings))


def _versions() -> Iterator[_Finding]:
    yield _Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("thunder-xform", *_TESTED):
        version, tested = installed_version(name), _TESTED.get(name)
        if version is None:
            # The core itself may run from a checkout; a missing host is reported by its own check.
            yield _Finding(name, "note", "no installed distribution of this name")
        elif tested is None or version.partition("+")[0] == tested:
            yield _Finding(name, "ok", version + (" (tested)" if tested else ""))
        else:
            yield _Finding(name, "note", f"{version}; this release was tested with {tested}")


def _torch() -> Iterator[_Finding]:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        yield _Finding("torch", "problem", f"cannot be imported ({type(error).__name__}: {error}). Install torch.")
        return
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield _Finding("devices", "ok", ", ".join(devices) or "CPU only")
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        yield _Finding("process groups", "problem", "this build of torch has none. Install one with torch.distributed.")
        return
    for backend in ("gloo", "nccl", "mpi"):
        available = getattr(distributed, f"is_{backend}_available")()
        yield _Finding(f"process group: {backend}", "ok" if available else "note", "yes" if available else "no")


def _thunder() -> Iterator[_Finding]:
    try:
        thunder = importlib.import_module("thunder")
    except Exception as error:
        text = f"cannot be imported ({type(error).__name__}: {error}). Install lightning-thunder."
        yield _Finding("thunder", "problem", text)
        return
    names = [executor.name for executor in thunder.get_all_executors()]
    yield _Finding("executors", "ok", ", ".join(sorted(names)))
    nvfuser = "nvfuser" in names
    hint = "yes" if nvfuser else "no; optional, see the nvfuser-* extras"
    yield _Finding("executor: nvfuser", "ok" if nvfuser else "note", hint)


def _model(arguments: argparse.Namespace) -> Iterator[_Finding]:
    if arguments.model is None:
        return
    from thunder_xform.cli._model import check_model

    try:
        for mode, equal, report in check_model(arguments.model, arguments.request, arguments.edge):
            yield _Finding(f"model: {mode}", "ok" if equal else "problem", report)
    except XformError as error:
        yield _Finding("model", "problem", str(error))


def _plugins() -> Iterator[_Finding]:
    records = registry.list()
    if not records:
        yield _Finding("plugins", "note", "none is installed. Try: pip install thunder-xform-lora")
    for record in records:
        topic = f"plugin: {record.name}"
        if record.error is None:
            yield _Finding(topic, "ok", f"{record.origin} ({record.manifest.stage if record.manifest else None})")
        else:
            level = "note" if record.status == "denied" else "problem"
            yield _Finding(topic, level, f"[{record.origin}] {record.error}")
        for other in record.shadowed:
            yield _Finding(topic, "note", f"{record.origin} hides {record.distribution} {other}")
