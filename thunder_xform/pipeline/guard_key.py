"""The value that compiled entries are valid for: what plugins say, and the modes of the modules."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable

import torch

from thunder_xform.host.guards import training_modes
from thunder_xform.pipeline.hooks import PluginHooks


class GuardKey:
    """Read on every call of the model, so that it holds whoever changed what it is made of."""

    def __init__(self, hooks: PluginHooks, module: torch.nn.Module) -> None:
        self._hooks = hooks
        self._parts = (*hooks.guard_keys().items(), ("training", training_modes(module)))

    def read(self) -> tuple[Hashable, ...]:
        """The value now."""
        return tuple([read() for _, read in self._parts])

    def named(self) -> dict[str, Hashable]:
        """:meth:`read`, checked, with the names of those who contribute to it.

        Raises:
            VerificationError: a plugin's part cannot be hashed and compared, or differs when it is read again.
        """
        key, again = self._by_name(), self._by_name()
        for index, name in enumerate(self._hooks.names):
            value = key.get(name)
            try:
                hash(value)
                stable = bool((value,) == (again.get(name),))
            except Exception as error:
                problem = f"the key {value!r} cannot be hashed and compared ({error})"
                self._hooks.fail(index, "guard_key", problem)
            if not stable:
                problem = f"the key changed from {value!r} to {again[name]!r} while nothing else did"
                self._hooks.fail(index, "guard_key", problem)
        return key

    def _by_name(self) -> dict[str, Hashable]:
        key: dict[str, Hashable] = {}
        for name, read in self._parts:
            plugins = self._hooks.names
            with self._hooks.blaming(plugins.index(name), "guard_key") if name in plugins else contextlib.nullcontext():
                key[name] = read()
        return key
