"""The lock: exactly which code, options and host versions a pipeline consists of."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thunder_xform.errors import ResolutionError
from thunder_xform.registry._host import host_versions
from thunder_xform.registry._text import type_name
from thunder_xform.registry.step import Step

__all__ = ["Lock"]

_SCHEMA = 1


@dataclass(frozen=True)
class Lock:
    """The identity of a pipeline as plain JSON data: equal where the same program would be compiled."""

    data: Mapping[str, Any]

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Lock:
        """The lock of `steps`, in their order."""
        return cls(
            {
                "schema": _SCHEMA,
                "host": host_versions(),
                "steps": [
                    {
                        "name": step.name,
                        "distribution": step.distribution,
                        "version": step.version,
                        "content": content_hash(step.packages),
                        "options": {key: _plain(value) for key, value in step.options.items()},
                        **({"instance": type_name(step.instance)} if step.instance is not None else {}),
                    }
                    for step in steps
                ],
            }
        )

    def to_json(self) -> str:
        """Canonical JSON: equal locks give equal text."""
        return json.dumps(self.data, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Lock:
        """Read what `to_json` wrote. Raises `ResolutionError` if `text` is no lock of a known schema."""
        try:
            data = json.loads(text)
            lock = cls(data)
            if data["schema"] == _SCHEMA and all(step.keys() >= _STEP_KEYS for step in data["steps"]) and data["host"]:
                return lock
            problem = f"the lock has schema {data['schema']!r}, or lacks fields of schema {_SCHEMA}."
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"the text is no lock ({type(error).__name__}: {error})."
        raise ResolutionError(problem, "Give the text that Lock.to_json() of this version wrote.")

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def diff(self, other: Lock) -> tuple[str, ...]:
        """What changes from this lock to `other`, a line each; empty if they are equal."""
        lines = [*_changes("host ", self.data["host"], other.data["host"])]
        mine, theirs = ({step["name"]: step for step in lock.data["steps"]} for lock in (self, other))
        lines += [f"{name}: removed" for name in mine if name not in theirs]
        lines += [f"{name}: added" for name in theirs if name not in mine]
        for name in mine:
            if name in theirs:
                a, b = dict(mine[name]), dict(theirs[name])
                lines += _changes(f"{name}: option ", a.pop("options"), b.pop("options"))
                lines += _changes(f"{name}: ", a, b)
        orders = [[name for name in names if name in mine and name in theirs] for names in (mine, theirs)]
        if orders[0] != orders[1]:
            lines.append(f"order: {', '.join(orders[0])} -> {', '.join(orders[1])}")
        return tuple(lines)


_STEP_KEYS = {"name", "distribution", "version", "content", "options"}


def _changes(label: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterable[str]:
    for key in sorted(a.keys() | b.keys()):
        if key not in a or key not in b or json.dumps(a[key], sort_keys=True) != json.dumps(b[key], sort_keys=True):
            yield f"{label}{key} {_shown(a, key)} -> {_shown(b, key)}"


def _shown(table: Mapping[str, Any], key: str) -> str:
    if key not in table:
        return "unset"
    value = table[key]
    return value if isinstance(value, str) and key != "options" else json.dumps(value)


def content_hash(packages: Iterable[Path]) -> str | None:
    """SHA-256 over the files of `packages` and their places within them; ``None`` without packages.

    The files on disk are hashed instead of trusting RECORD, because those are what will be imported: local
    edits count, a wheel and an editable install of one source agree, and the place of installation does not
    matter.
    """
    digest = hashlib.sha256()
    roots = list(packages)
    for root in roots:
        files = (p for p in root.rglob("*") if p.suffix not in (".pyc", ".pyo") and p.is_file())
        for name, path in sorted((f"{root.name}/{p.relative_to(root).as_posix()}", p) for p in files):
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()}" if roots else None


def _plain(value: Any) -> Any:
    """The value as JSON; an object is represented by its type, and by its name where it is a constant."""
    match value:
        case enum.Enum():
            return {"$object": type_name(value), "name": value.name}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
        case tuple() | list():
            return [_plain(entry) for entry in value]
        case Mapping() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _plain(entry) for key, entry in value.items()}
        case Mapping():
            pairs = [[_plain(key), _plain(entry)] for key, entry in value.items()]
            return {"$map": sorted(pairs, key=lambda pair: json.dumps(pair, sort_keys=True))}
        case type():
            return {"$object": "type", "name": f"{value.__module__}.{value.__qualname__}"}
    # A constant that a module offers under the value's own repr, such as torch.bfloat16, is told apart by it.
    module, _, name = repr(value).rpartition(".")
    if name.isidentifier() and getattr(sys.modules.get(module), name, None) is value:
        return {"$object": type_name(value), "name": f"{module}.{name}"}
    return {"$object": type_name(value)}
