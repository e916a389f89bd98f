"""One plugin of a resolved pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thunder_xform.manifest import Manifest
from thunder_xform.registry._options import read_options

__all__ = ["Step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A plugin with the options it will get and the reason it is there."""

    name: str
    distribution: str
    version: str
    #: The entry point's value, such as ``"thunder_xform_lora:manifest.toml"``.
    entry_point: str = ""
    manifest: Manifest
    #: The options set by the caller or a bundle; all others keep the defaults of the options class.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: ``requested``, ``required by X`` or ``wanted by X``.
    reason: str = "requested"
    #: The plugin object, where the caller supplied one.
    instance: object | None = None
    #: Directories of the packages that the plugin's code is imported from.
    packages: tuple[Path, ...] = ()

    @property
    def origin(self) -> str:
        """``"distribution version"``, as it appears in messages."""
        return f"{self.distribution} {self.version}".strip()

    def option(self, name: str) -> Any:
        """The value set for the option, or else its default where that is a literal, or else ``None``."""
        if name in self.options:
            return self.options[name]
        fields = read_options(self.manifest.options) if self.manifest.options else None
        return next((f.default_value() for f in fields or () if f.name == name), None)
