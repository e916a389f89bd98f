"""Lightning Fabric, from ``lightning`` or ``lightning-fabric``: two copies of one library with distinct classes.

The copy that the program has imported already is the one whose ``Fabric`` it uses; if it has imported neither or both,
``lightning`` comes first.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
    from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading as validate_keys
else:

    def _package() -> str:
        copies = ("lightning.fabric", "lightning_fabric")
        loaded = [name for name in copies if name in sys.modules]
        return loaded[0] if len(loaded) == 1 else next(n for n in copies if find_spec(n.partition(".")[0]))

    _NAME = _package()

    def _from(module: str, name: str) -> Any:
        return getattr(import_module(f"{_NAME}.{module}"), name)

    STRATEGY_REGISTRY = _from("strategies", "STRATEGY_REGISTRY")
    DDPStrategy = _from("strategies", "DDPStrategy")
    BackwardSyncControl = _from("strategies.strategy", "_BackwardSyncControl")
    validate_keys = _from("strategies.strategy", "_validate_keys_for_strict_loading")
    Precision = _from("plugins.precision", "Precision")
    DoublePrecision = _from("plugins.precision", "DoublePrecision")
    HalfPrecision = _from("plugins.precision", "HalfPrecision")
    MixedPrecision = _from("plugins.precision", "MixedPrecision")

__all__ = [
    "STRATEGY_REGISTRY",
    "BackwardSyncControl",
    "DDPStrategy",
    "DoublePrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "validate_keys",
]
