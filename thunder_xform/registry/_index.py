"""Which plugins a name, capability or prefix means, looked up instead of searched for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thunder_xform.manifest import Manifest

__all__ = ["Index"]


class Index:
    """The names of plugins by whatever pattern `Manifest.matches`, in the order in which they were added."""

    def __init__(self, manifests: Iterable[Manifest] = ()) -> None:
        self._names: dict[str, list[str]] = {}
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: Manifest) -> None:
        """Add one plugin."""
        parts = [capability.split(".") for capability in manifest.provides]
        prefixes = (".".join((*words[:i], "*")) for words in parts for i in range(1, len(words)))
        for pattern in dict.fromkeys((manifest.name, *manifest.provides, *prefixes)):
            self._names.setdefault(pattern, []).append(manifest.name)

    def names(self, pattern: str) -> Sequence[str]:
        """The plugins that `pattern` matches."""
        return self._names.get(pattern, ())
