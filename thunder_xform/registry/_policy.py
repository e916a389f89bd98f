"""Allow and deny lists, by plugin name or by distribution, decided before anything is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from thunder_xform.errors import DeniedError, UnknownNameError, closest
from thunder_xform.registry._record import Record

__all__ = ["Policy"]

_ALLOW = "THUNDER_XFORM_ALLOW"
_DENY = "THUNDER_XFORM_DENY"


@dataclass(frozen=True, slots=True)
class Policy:
    """Lists from the call and from the environment; a plugin must pass each of them.

    An allow list that is given but empty allows nothing.
    """

    allow: Mapping[str, tuple[str, ...]]
    deny: Mapping[str, tuple[str, ...]]

    @classmethod
    def gather(cls, allow: Iterable[str] | None, deny: Iterable[str] | None, environ: Mapping[str, str]) -> Policy:
        """The lists of a call (``None``: no list) and those of `environ`."""
        return cls(_lists("allow", allow, _ALLOW, environ), _lists("deny", deny, _DENY, environ))

    def check_known(self, records: Iterable[Record]) -> None:
        """Raise `UnknownNameError` for an entry that means nothing installed: no typo passes silently."""
        records = tuple(records)
        for source, entries in (*self.allow.items(), *self.deny.items()):
            for entry in entries:
                if not any(record.answers_to(entry) for record in records):
                    known = {name for record in records for name in (record.name, record.distribution)}
                    raise UnknownNameError(
                        f"{source} lists {entry!r}, which is no installed plugin or distribution."
                        + closest(entry, known),
                        "Correct the entry, or install it.",
                        name=entry,
                        known=tuple(sorted(known)),
                    )

    def verdict(self, record: Record) -> DeniedError | None:
        """Why `record` may not be used, or ``None``."""
        for source, entries in self.deny.items():
            if any(map(record.answers_to, entries)):
                return self._denied(record, source, f"is excluded by {source}", "Remove it from that list")
        for source, entries in self.allow.items():
            if not any(map(record.answers_to, entries)):
                return self._denied(record, source, f"is not on the list {source}", "Add it to that list")
        return None

    @staticmethod
    def _denied(record: Record, source: str, problem: str, remedy: str) -> DeniedError:
        return DeniedError(
            f"{record.name!r} [{record.origin}] {problem}.",
            f"{remedy}, or leave it out of the request.",
            name=record.name,
            distribution=record.distribution,
            source=source,
        )


def _lists(
    argument: str, given: Iterable[str] | None, variable: str, environ: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    lists = {}
    if given is not None:
        lists[f"{argument}="] = (given,) if isinstance(given, str) else tuple(given)
    if variable in environ:
        lists[variable] = tuple(entry.strip() for entry in environ[variable].split(",") if entry.strip())
    return lists
