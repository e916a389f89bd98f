"""Lightning Fabric strategies that train with Lightning Thunder.

Importing this package registers them by name: ``Fabric(strategy="thunder_ddp")``, ``Fabric(strategy="thunder_fsdp")``.
"""

from __future__ import annotations

from thunder_xform_fabric._lightning import STRATEGY_REGISTRY
from thunder_xform_fabric.strategies import ThunderDDPStrategy, ThunderFSDPStrategy
from thunder_xform_fabric.strategy import ThunderStrategy

__all__ = ["ThunderDDPStrategy", "ThunderFSDPStrategy", "ThunderStrategy"]

for _strategy in (ThunderDDPStrategy, ThunderFSDPStrategy):
    _strategy.register_strategies(STRATEGY_REGISTRY)
