"""The strategies that have a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.nn import Module

from thunder_xform_fabric.strategy import ThunderStrategy


class ThunderDDPStrategy(ThunderStrategy):
    """:class:`ThunderStrategy` with the plugin ``ddp``: every process holds all parameters.

    Args:
        transforms: further transforms, such as ``["lora"]``.
        options: options by plugin name, those of ``ddp`` included.
        kwargs: as for :class:`ThunderStrategy`.
    """

    def __init__(
        self, *, transforms: Sequence[Any] = (), options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__([*transforms, "ddp"], options=options, **kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("thunder_ddp", cls, description="Data parallel training with Thunder", override=True)


class ThunderFSDPStrategy(ThunderStrategy):
    """:class:`ThunderStrategy` with the plugin ``fsdp``: every process holds a shard of all parameters.

    The whole model is never moved to the device. ``fabric.init_module(empty_init=True)`` creates it on the meta device;
    ``fabric.setup`` then initializes it shard by shard with each module's ``reset_parameters``.

    Args:
        transforms: further transforms, such as ``["lora"]``.
        options: options by plugin name, those of ``fsdp`` included.
        kwargs: as for :class:`ThunderStrategy`.
    """

    def __init__(
        self, *, transforms: Sequence[Any] = (), options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__([*transforms, "fsdp"], options=options, **kwargs)

    def setup_module(self, module: Module) -> Any:
        fsdp = {"device": str(self.root_device), **self._options.get("fsdp", {})}
        self._options = {**self._options, "fsdp": fsdp}
        return super().setup_module(module)

    def module_to_device(self, module: Module) -> None:
        """Nothing: only shards live on the device."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            "thunder_fsdp", cls, description="Fully sharded data parallel training with Thunder", override=True
        )
