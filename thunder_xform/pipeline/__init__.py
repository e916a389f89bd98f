"""From an ordered resolution to Thunder transforms that run the plugins' hooks."""

from __future__ import annotations

from thunder_xform.context import Context
from thunder_xform.host.events import CompileEvent
from thunder_xform.pipeline.handle import Handle, handle
from thunder_xform.pipeline.instruments import Timing, TraceDump
from thunder_xform.pipeline.pipeline import Pipeline, build
from thunder_xform.plugin import Plugin

__all__ = [
    "CompileEvent",
    "Context",
    "Handle",
    "Pipeline",
    "Plugin",
    "Timing",
    "TraceDump",
    "build",
    "handle",
]
