"""thunder-xform's ``lora`` plugin: low-rank adapters on linear layers of a model that Thunder compiles.

``Options`` can stand in a request: ``registry.resolve([Options(r=16)])``.
"""

from __future__ import annotations

from thunder_xform_lora.options import Options

__all__ = ["Options"]
