"""The plugins that one call may use, looked up by name, capability or object."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from thunder_xform.errors import DuplicateClaimError, UnknownNameError, XformError, spell
from thunder_xform.manifest import Manifest
from thunder_xform.registry._advice import installation
from thunder_xform.registry._host import check_host
from thunder_xform.registry._index import Index
from thunder_xform.registry._policy import Policy
from thunder_xform.registry._record import Record, normalize

__all__ = ["Catalog"]


class Catalog:
    """All records, each judged by the policy, the host's versions, and whether its name is claimed once."""

    def __init__(self, records: Iterable[Record], policy: Policy) -> None:
        records = tuple(records)
        policy.check_known(records)
        judged = [replace(record, error=policy.verdict(record) or record.error) for record in records]
        claims: dict[str, list[Record]] = {}
        for record in sorted(judged, key=lambda record: (record.name, normalize(record.distribution))):
            claims.setdefault(record.name, []).append(record)
        self.records = tuple(record for same in claims.values() for record in _judge(same))
        self._by_name: dict[str, Record] = {}
        for record in self.records:
            if record.status != "denied" or record.name not in self._by_name:
                self._by_name[record.name] = record
        self._by_meant = {record.meant: record for record in self.records if record.meant}
        self._announced = Index(record.manifest for record in self.records if record.manifest)

    @property
    def names(self) -> tuple[str, ...]:
        """Every announced name, sorted."""
        return tuple(self._by_name)

    def find(self, name: str) -> Record | None:
        """The record that `name` means, usable or not."""
        return self._by_name.get(name) or self._by_meant.get(name)

    def get(self, name: str) -> tuple[Record, Manifest]:
        """The usable record of `name`. Raises `UnknownNameError`, or the error that makes it unusable."""
        record = self.find(name)
        if record is None:
            raise self.unknown(name)
        if record.error is not None or record.manifest is None:
            raise unusable(record)
        return record, record.manifest

    def usable(self, name: str) -> bool:
        """Whether `get` would succeed."""
        record = self.find(name)
        return record is not None and record.error is None and record.manifest is not None

    def matching(self, pattern: str) -> tuple[str, ...]:
        """The usable plugins that `pattern` names, or that provide the capability it names, sorted."""
        return tuple(self._usable.names(pattern))

    @cached_property
    def _usable(self) -> Index:
        manifests = (record.manifest for name, record in self._by_name.items() if self.usable(name))
        return Index(manifest for manifest in manifests if manifest and not manifest.is_bundle)

    def means_something(self, pattern: str) -> bool:
        """Whether `pattern` names any announced plugin or capability, usable or not."""
        return pattern in self._by_name or bool(self._announced.names(pattern))

    def owner(self, cls: type, field: str) -> tuple[Record, Manifest] | None:
        """The usable record whose `field` (``plugin`` or ``options``) is the already imported class `cls`."""
        for name, record in self._by_name.items():
            module, _, attribute = (getattr(record.manifest, field, None) or "").partition(":")
            if module and getattr(sys.modules.get(module), attribute, None) is cls:
                return self.get(name)
        return None

    def unknown(self, name: str) -> UnknownNameError:
        """The error for a name that nothing installed provides."""
        known = f"Installed are {spell(self.names)}." if self.names else "No plugin is installed at all."
        capabilities = {c for record in self.records if record.manifest for c in record.manifest.provides}
        hint, how = installation(name, capabilities if "." in name else self.names)
        return UnknownNameError(
            f"no installed plugin is called {name!r}.{hint}",
            f"{known} {how}".rstrip(),
            name=name,
            known=self.names,
        )


def _judge(same: list[Record]) -> list[Record]:
    """Settle the records of one name: denied ones out of the way, the rest must be one."""
    open_claims = [record.origin for record in same if record.status != "denied"]
    if len(open_claims) > 1:
        error = DuplicateClaimError(name=same[0].name, distributions=open_claims)
        return [record if record.status == "denied" else replace(record, error=error) for record in same]
    return [replace(record, error=record.error or check_host(record, absent=False)) for record in same]


def unusable(record: Record) -> XformError:
    """The record's error, copied so that a traceback never sticks to the shared record."""
    import copy

    return copy.copy(record.error) if record.error else XformError(f"{record.origin} declares nothing.")
