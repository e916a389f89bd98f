"""Loaded before every test module, so that any of them can import Thunder on torch 2.13 and newer."""

import thunder_xform  # noqa: F401
