"""thunder-xform's ``lora`` plugin: low-rank adapters for a model that Thunder compiles.

``Options`` can stand in a request: ``registry.resolve([Options(r=16)])``. Adapters travel to PEFT and back with
``save_peft``, ``peft_options`` and ``load_peft``.
"""

from __future__ import annotations

from thunder_xform_lora.files import load_peft, peft_options, save_peft
from thunder_xform_lora.options import Options

__all__ = ["Options", "load_peft", "peft_options", "save_peft"]
