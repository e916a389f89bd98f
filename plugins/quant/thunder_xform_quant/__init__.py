"""thunder-xform's ``quant`` plugin: weights of linear layers in 4 or 8 bits, for models that Thunder compiles.

``Options`` can stand in a request: ``registry.resolve([Options(scheme="int8")])``. A plugin that publishes another
scheme subclasses ``Scheme`` and offers it, while it is in the same pipeline, through an attribute ``quant_schemes``:
a mapping from names to what makes the scheme.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thunder_xform_quant.options import Options

if TYPE_CHECKING:
    from thunder_xform_quant.scheme import Packed, Scheme

__all__ = ["Options", "Packed", "Scheme"]


def __getattr__(name: str) -> Any:
    # These need torch, options do not.
    if name in ("Packed", "Scheme"):
        from thunder_xform_quant import scheme

        return getattr(scheme, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
