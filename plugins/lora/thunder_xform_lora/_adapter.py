"""The adapters of a model: what each consists of, and how it starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import thunder_xform as tx
from thunder_xform_lora import _dora, _pissa
from thunder_xform_lora._target import Target
from thunder_xform_lora._targets import find_targets
from thunder_xform_lora._trained import Trained, find_trained
from thunder_xform_lora.options import Options


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter.

    Attributes:
        name: its name.
        options: its own, which may differ from those of others.
        targets: the weights that it belongs to.
        trained: parameters of the model that train along with it.
    """

    name: str
    options: Options
    targets: tuple[Target, ...]
    trained: tuple[Trained, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the layers with the adapter, in module order but for tied ones."""
        return tuple(path for target in self.targets for path in target.modules)

    @property
    def file_keys(self) -> dict[str, str]:
        """Names of its tensors by what PEFT calls them in files, relative to the model."""
        keys: dict[str, str] = {}
        for target in self.targets:
            keys |= target.file_keys
        return keys | {key: each.name for each in self.trained for key in each.keys}

    @property
    def exclusive(self) -> str:
        """Options because of which no other adapter can be active at the same time; empty without."""
        asked = {"bias": self.trained, "modules_to_save": self.trained, "use_dora": self.options.use_dora}
        return ", ".join(f"{option}={getattr(self.options, option)!r}" for option, holds in asked.items() if holds)


def find_adapters(options: Options, params: tx.Parameters, ctx: tx.Context) -> dict[str, Adapter]:
    """The adapters by name. Nothing is changed.

    Raises:
        OptionError: see :func:`find_targets` and :func:`find_trained`; or an adapter starts from values that are
            not at hand.
    """
    adapters = {}
    for name, own in options.each.items():
        targets = find_targets(name, own, params, ctx)
        if own.use_dora:
            _dora.check(targets, params, ctx)
        _pissa.check(targets, params, ctx)
        adapters[name] = Adapter(name, own, targets, find_trained(name, own, targets, params, ctx))
    return adapters


def add_tensors(target: Target, params: tx.Parameters) -> None:
    """Add A, B and magnitudes, initialized as by PEFT. Under "pissa", replace the weight, too.

    They are float64 for a float64 weight, otherwise float32, as PEFT's are (``autocast_adapter_dtype``).
    """
    base = params.version(target.weight)
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    a, b = (torch.empty(shape, dtype=dtype, device=base.device) for shape in target.layer.shapes(target.r))
    if target.decomposed:
        a, b, residual = _pissa.decompose(target, params.tensor(target.weight))
        params.replace(target.weight, residual)
    else:
        target.layer.initialize(a, b, target.options.init_lora_weights)
    tensors = [a, b]
    if target.options.use_dora:
        tensors.append(_dora.lengths(target.layer, params.value(target.weight).detach(), a, b, target.scaling))
    # Tied layers have one adapter under the names of each.
    for tensor, (name, *aliases) in zip(tensors, zip(*map(target.names_in, target.modules), strict=True), strict=True):
        params.add(name, tensor, aliases=aliases)
