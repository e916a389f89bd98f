"""State of a transformed model, and adapter files.

Three kinds of state, from :meth:`thunder_xform.Handle.state_dict`:

``"full"``
    keys, shapes and values of the plain model that computes the same function; it loads there strictly.
``"adapter"``
    the tensors that plugins of the stage ``adapters`` added. The base model and these resume exactly.
``"sharded"``
    every stored tensor as this rank holds it.
"""

from __future__ import annotations

from thunder_xform.checkpoint.adapter import adapter_request, load_adapter, save_adapter
from thunder_xform.checkpoint.state import IncompatibleKeys, Kind, export_state, import_state

__all__ = [
    "IncompatibleKeys",
    "Kind",
    "adapter_request",
    "export_state",
    "import_state",
    "load_adapter",
    "save_adapter",
]
