"""Adapter tensors: their names, their initial values, and what they amount to."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import thunder_xform as tx
from thunder_xform_lora._pissa import PISSA, decompose
from thunder_xform_lora._targets import Target


def names(target: Target, adapter: str, dora: bool = False) -> tuple[str, ...]:
    """Names of A and B as in a PEFT model, such as ``<module>.lora_A.<adapter>.weight``.

    Under DoRA there is a third, of the lengths of rows.
    """
    module = target.modules[0]
    own = _names(target, module, adapter)
    return (*own, magnitude_name(module, adapter)) if dora else own


def _names(target: Target, module: str, adapter: str) -> tuple[str, ...]:
    return tuple(f"{module}.{part.format(adapter)}".removeprefix(".") for part in target.layer.parts)


def magnitude_name(module: str, adapter: str) -> str:
    """Name of the lengths of rows that a layer learns under DoRA."""
    return f"{module}.lora_magnitude_vector.{adapter}.weight".removeprefix(".")


def file_keys(target: Target, adapter: str, dora: bool) -> dict[str, str]:
    """Names of an adapter's tensors by what PEFT calls them in files: without the adapter's, for every tied layer."""
    endings = [part.replace(".{}", "") for part in target.layer.parts] + ["lora_magnitude_vector"] * dora
    keys = [f"{module}.{ending}" for module in target.modules for ending in endings]
    return dict(zip(keys, names(target, adapter, dora) * len(target.modules), strict=True))


def add(targets: Iterable[Target], adapter: str, init: bool | str, params: tx.Parameters) -> None:
    """Add A and B of each target, initialized as by PEFT. For "pissa", replace the weights of linear layers, too.

    They are float64 for a float64 weight, otherwise float32, as PEFT's are (``autocast_adapter_dtype``).
    """
    for target in targets:
        base = params.version(target.weight)
        dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
        a, b = (torch.empty(shape, dtype=dtype, device=base.device) for shape in target.layer.shapes(target.r))
        if init == PISSA and target.layer.linear:
            a, b, residual = decompose(target, params.tensor(target.weight))
            params.replace(target.weight, residual)
        else:
            target.layer.initialize(a, b, init)
        # Tied layers have one adapter under the names of each.
        tied = [_names(target, module, adapter) for module in target.modules[1:]]
        for index, tensor in enumerate((a, b)):
            params.add(names(target, adapter)[index], tensor, aliases=[pair[index] for pair in tied])


def merged(target: Target, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float) -> torch.Tensor:
    """The weight with its adapter ``factor`` times, in the weight's dtype, rounded once."""
    delta = target.layer.change(a, b) * (target.scaling * factor)
    return (weight.to(delta.dtype) + delta.to(weight.device)).to(weight.dtype)
