"""Thunder's classes that the pipeline subclasses or names."""

from __future__ import annotations

from thunder.core.module import ThunderModule
from thunder.core.proxies import TensorProxy
from thunder.core.recipe import PluginPolicy
from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.core.transform_common import Transform

__all__ = ["PluginPolicy", "TensorProxy", "ThunderModule", "TraceCtx", "TraceProvenance", "Transform"]
