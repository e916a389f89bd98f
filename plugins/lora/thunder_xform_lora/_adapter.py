"""Adapter tensors: their names, their initial values, and what they amount to."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

import thunder_xform as tx
from thunder_xform_lora._targets import Target

_PARTS = ("lora_A", "lora_B")


def names(target: Target, adapter: str, dora: bool = False) -> tuple[str, ...]:
    """Names of A and B, as in a PEFT model: ``<module>.lora_A.<adapter>.weight``, and so for ``lora_B``.

    Under DoRA there is a third, of the lengths of rows.
    """
    module = target.modules[0]
    own = _names(module, adapter)
    return (*own, magnitude_name(module, adapter)) if dora else own


def _names(module: str, adapter: str) -> tuple[str, str]:
    prefix = f"{module}." if module else ""
    a, b = (f"{prefix}{part}.{adapter}.weight" for part in _PARTS)
    return a, b


def magnitude_name(module: str, adapter: str) -> str:
    """Name of the lengths of rows that a layer learns under DoRA."""
    return f"{module}.lora_magnitude_vector.{adapter}.weight".removeprefix(".")


def file_keys(target: Target, adapter: str, dora: bool) -> dict[str, str]:
    """Names of an adapter's tensors by what PEFT calls them in files: without the adapter's, for every tied layer."""
    endings = [f"{part}.weight" for part in _PARTS] + ["lora_magnitude_vector"] * dora
    keys = [f"{module}.{ending}" for module in target.modules for ending in endings]
    return dict(zip(keys, names(target, adapter, dora) * len(target.modules), strict=True))


def add(targets: Iterable[Target], adapter: str, init: bool | str, params: tx.Parameters) -> None:
    """Add A and B of each target.

    Initialized as by PEFT: A like the weight of a torch.nn.Linear, or for "gaussian" from a normal distribution of
    standard deviation 1 / r; B zero, or for False like A.

    They are float64 for a float64 weight, otherwise float32, as PEFT's are (``autocast_adapter_dtype``).
    """
    for target in targets:
        base = params.version(target.weight)
        dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
        a = torch.empty(target.r, target.in_features, dtype=dtype, device=base.device)
        b = torch.zeros(target.out_features, target.r, dtype=dtype, device=base.device)
        if init == "gaussian":
            torch.nn.init.normal_(a, std=1 / target.r)
        else:
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        if not init:
            torch.nn.init.kaiming_uniform_(b, a=math.sqrt(5))
        # Tied layers have one adapter under the names of each.
        tied = [_names(module, adapter) for module in target.modules[1:]]
        for index, tensor in enumerate((a, b)):
            params.add(names(target, adapter)[index], tensor, aliases=[pair[index] for pair in tied])


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """``weight + scaling * B @ A`` in the weight's dtype, rounded once."""
    delta = (b @ a) * scaling
    return (weight.to(delta.dtype) + delta.to(weight.device)).to(weight.dtype)
