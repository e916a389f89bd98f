"""Pipelines of plugin objects at hand, without manifests, for unit tests of plugins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thunder_xform.manifest import Effects, Manifest
from thunder_xform.pipeline import Pipeline, build
from thunder_xform.registry import Resolution, Step

#: Covers every effect there is.
ALL_EFFECTS = ("params", "buffers", "trace")


def pipeline_of(
    *,
    _writes: Iterable[str] | Mapping[str, Iterable[str]] = ALL_EFFECTS,
    _verify: bool = True,
    **plugins: Any,
) -> Pipeline:
    """A pipeline of plugin objects, named and ordered as the keywords are.

    >>> pipeline_of(freeze=Freeze(None), lora=LoRA(options))

    Args:
        _writes: effects that every plugin declares, or those of each by name; all that exist by default.
        _verify: check traces and effects after every plugin.
        plugins: the plugin objects.
    """
    steps = [
        Step(
            name=name,
            distribution=f"thunder-xform-{name}",
            version="0",
            manifest=Manifest(
                name=name,
                plugin=f"{type(plugin).__module__}:{type(plugin).__qualname__}",
                stage="weights",
                effects=Effects(writes=tuple(_writes[name] if isinstance(_writes, Mapping) else _writes)),
            ),
            instance=plugin,
        )
        for name, plugin in plugins.items()
    ]
    members = list(zip(steps, plugins.values(), strict=True))
    return build(Resolution(tuple(steps)), members, verify=_verify)
