"""``thunder-xform validate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from thunder_xform.cli._hooks import hook_errors, hook_warnings
from thunder_xform.cli._output import print_json, say
from thunder_xform.cli._project import announcement_errors
from thunder_xform.errors import UnknownNameError, XformError, closest, spell
from thunder_xform.implementations import faults
from thunder_xform.manifest import EFFECTS, Manifest
from thunder_xform.registry import Record, Step
from thunder_xform.registry._files import module_file
from thunder_xform.registry._options import read_options
from thunder_xform.registry._record import normalize
from thunder_xform.registry._registry import installed

__all__ = ["run"]

_EDGES = ("requires", "wants", "after", "before", "conflicts", "commutes")


def run(arguments: argparse.Namespace) -> int:
    """Print errors and warnings for each plugin of the target; 1 if there is an error."""
    findings = []
    for record in _targets(arguments.target):
        with _importable(record):
            findings.append((record, *_examine(record, imports=arguments.imports)))
    failed = any(errors for _, errors, _ in findings)
    if arguments.json:
        print_json(
            [
                {
                    "name": record.name,
                    "distribution": record.distribution,
                    "errors": errors,
                    "warnings": warnings,
                }
                for record, errors, warnings in findings
            ]
        )
        return int(failed)
    for record, errors, warnings in findings:
        say(f"{record.name} [{record.origin or 'not installed'}]: {'not valid' if errors else 'valid'}")
        for error in errors:
            say(f"  error: {error}", problem=True)
        for warning in warnings:
            say(f"  warning: {warning}")
    return int(failed)


def _targets(target: str) -> list[Record]:
    path = Path(target)
    if path.exists():
        return [_read(manifest) for manifest in _manifests(path)]
    records = installed().list()
    found = [record for record in records if normalize(record.distribution) == normalize(target)]
    if not found:
        known = sorted({record.distribution for record in records})
        raise UnknownNameError(
            f"{target!r} is neither a path nor a distribution with plugins.{closest(target, known)}",
            "Give a distribution, a manifest, or a folder that contains one.",
            name=target,
            known=tuple(known),
        )
    return found


def _manifests(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    places = ("manifest.toml", "*/manifest.toml", "src/*/manifest.toml")
    found = [match for place in places for match in sorted(path.glob(place))]
    if not found:
        raise UnknownNameError(
            f"{path} contains no manifest.toml, nor does a package directly in it or in its src/.",
            "Give the path of the manifest itself.",
            name=str(path),
            known=(),
        )
    return found


def _read(path: Path) -> Record:
    try:
        manifest = Manifest.read(path)
    except XformError as error:
        return Record(name=str(path), distribution="", version="", error=error)
    package = path.resolve().parent
    return Record(
        name=manifest.name,
        distribution="",
        version="",
        entry_point=path.name,
        manifest=manifest,
        packages=(package,),
    )


@contextmanager
def _importable(record: Record) -> Iterator[None]:
    """Let a plugin that is given by path, not by distribution, be found where it lies."""
    saved = list(sys.path)
    if not record.distribution:
        sys.path[:0] = [str(package.parent) for package in record.packages]
    try:
        yield
    finally:
        sys.path[:] = saved


def _examine(record: Record, *, imports: bool) -> tuple[list[str], list[str]]:
    """The errors and warnings of one plugin."""
    if record.error is not None or record.manifest is None:
        return [str(record.error)], []
    errors = [*_check_classes(record.manifest), *_check_effects(record.manifest)]
    warnings = list(_check_edges(record.manifest))
    if record.manifest.plugin and not errors:
        errors += hook_errors(record.manifest.plugin)
    if not record.distribution:
        errors += announcement_errors(record.packages[0] / record.entry_point, record.manifest.name)
    if record.manifest.plugin and not errors:
        warnings += hook_warnings(record.manifest.plugin)
    warnings += _check_naming(record)
    if imports and not errors:
        errors += _check_imports(record)
    return errors, warnings


def _check_classes(manifest: Manifest) -> Iterator[str]:
    for field in ("plugin", "options"):
        target = getattr(manifest, field)
        module = target.partition(":")[0] if target else ""
        if module and module_file(module) is None:
            yield f"`{field}` is {target!r}, but there is no source file for the module {module!r}."
    fields = read_options(manifest.options) if manifest.options else ()
    known = [entry.name for entry in fields or ()]
    for resource, names in manifest.exclusive.items():
        for name in names:
            if fields is not None and name not in known:
                yield f"`exclusive.{resource}` lists {name!r}, which is no option.{closest(name, known)}"


def _check_effects(manifest: Manifest) -> Iterator[str]:
    for verb in ("reads", "writes"):
        for state in getattr(manifest.effects, verb):
            if state not in EFFECTS and not state.startswith("trace.compute."):
                yield (
                    f"`effects.{verb}` contains {state!r}, which there is not.{closest(state, EFFECTS)} "
                    f"Use some of {spell(EFFECTS)}."
                )


def _check_edges(manifest: Manifest) -> Iterator[str]:
    catalog = installed().catalog()
    for field in _EDGES:
        for pattern in getattr(manifest, field):
            if not (manifest.matches(pattern) or catalog.means_something(pattern)):
                yield f"`{field}` names {pattern!r}, which nothing installed is called or provides."
    if manifest.options and not manifest.is_bundle:
        fields = read_options(manifest.options)
        if fields is None:
            yield f"`options` is {manifest.options!r}, no plain dataclass that could be read from its source."
        for entry in fields or ():
            if not entry.doc:
                yield f"the option {entry.name!r} is undocumented: put a string below or `#:` above it."
    if not manifest.summary:
        yield "`summary` is missing; `thunder-xform list` shows it."


def _check_naming(record: Record) -> Iterable[str]:
    expected = f"thunder-xform-{record.name.replace('_', '-')}"
    if record.distribution and normalize(record.distribution) != expected:
        yield f"the distribution would be found more easily as {expected!r}."


def _check_imports(record: Record) -> Iterator[str]:
    from thunder_xform.registry._load import load_class

    manifest = record.manifest
    if manifest is None or manifest.is_bundle:
        return
    distribution = record.distribution or record.packages[0].name
    step = Step(name=record.name, distribution=distribution, version=record.version, manifest=manifest)
    before = set(sys.modules)
    # The options first: whatever they pull in shows before the plugin does.
    for field in ("options", "plugin"):
        target = getattr(manifest, field)
        if target is None:
            continue
        try:
            loaded = load_class(step, target)
        except XformError as error:
            yield str(error)
            continue
        if not isinstance(loaded, type):
            yield f"`{field}` is {target!r}, which is no class."
        elif field == "plugin":
            yield from (f"the class {target} {problem}. {remedy}" for problem, remedy in faults(loaded))
        if field == "options" and "torch" in sys.modules.keys() - before:
            yield f"importing `options` ({target}) imports torch; it should not need it."
