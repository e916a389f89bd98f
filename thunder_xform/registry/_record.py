"""One announced plugin, usable or not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from thunder_xform.errors import DeniedError, DuplicateClaimError, HostVersionError, XformError
from thunder_xform.manifest import Manifest

__all__ = ["Record", "normalize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known about one announced plugin without importing it."""

    #: The plugin's name; for a broken one, that of the entry point.
    name: str
    distribution: str
    version: str
    #: The entry point's value, such as ``"thunder_xform_lora:manifest.toml"``.
    entry_point: str = ""
    manifest: Manifest | None = None
    #: The name in the manifest of a broken one, where its entry point has another.
    meant: str = ""
    #: Why the plugin cannot be used.
    error: XformError | None = None
    #: Directories of the packages that the plugin's code is imported from, for the content hash.
    packages: tuple[Path, ...] = ()
    #: Other installations of the distribution that this one hides, as ``"0.1.0 in DIRECTORY"``.
    shadowed: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """``ok``, ``bundle``, ``duplicate``, ``denied``, ``incompatible`` or ``broken``."""
        match self.error:
            case None:
                return "bundle" if self.manifest is not None and self.manifest.is_bundle else "ok"
            case DuplicateClaimError():
                return "duplicate"
            case DeniedError():
                return "denied"
            case HostVersionError():
                return "incompatible"
            case _:
                return "broken"

    @property
    def origin(self) -> str:
        """``"distribution version"``, as it appears in messages."""
        return f"{self.distribution} {self.version}".strip()

    def answers_to(self, entry: str) -> bool:
        """Whether an entry of an allow or deny list means this plugin, by its name or its distribution's."""
        return entry == self.name or normalize(entry) == normalize(self.distribution)


def normalize(distribution: str) -> str:
    """The distribution name under which spellings are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
