"""From an ordered resolution to Thunder transforms that run the plugins' hooks."""

from __future__ import annotations

from thunder_xform.pipeline.context import Context
from thunder_xform.pipeline.handle import Handle, handle
from thunder_xform.pipeline.pipeline import Pipeline, build
from thunder_xform.pipeline.plugin import Plugin

__all__ = ["Context", "Handle", "Pipeline", "Plugin", "build", "handle"]
