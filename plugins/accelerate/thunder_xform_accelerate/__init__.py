"""Hugging Face Accelerate for models that Lightning Thunder compiles through a pipeline of transforms."""

from __future__ import annotations

from thunder_xform_accelerate._accelerator import Accelerator

__all__ = ["Accelerator"]
