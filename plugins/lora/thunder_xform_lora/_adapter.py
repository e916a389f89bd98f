"""Adapter tensors: their names, their initial values, and what they amount to."""

from __future__ import annotations

import math
from collections.abc import Iterable

import thunder_xform as tx
import torch
from thunder_xform_lora._targets import Target

#: The adapter's name. PEFT calls its first one so, too; it is part of the tensors' names, so that there can be several.
ADAPTER = "default"


def names(target: Target) -> tuple[str, str]:
    """Names of A and B: ``<module>.lora_A.<adapter>.weight`` and the same with ``lora_B``, as in a PEFT model."""
    return _names(target.modules[0])


def _names(module: str) -> tuple[str, str]:
    prefix = f"{module}." if module else ""
    return f"{prefix}lora_A.{ADAPTER}.weight", f"{prefix}lora_B.{ADAPTER}.weight"


def add(targets: Iterable[Target], r: int, params: tx.Parameters) -> None:
    """Add A and B of each target: A uniform in (-1, 1) / sqrt(in_features) (Kaiming with a = sqrt(5), as PEFT does and
    ``torch.nn.Linear``), B zero.

    They are float64 for a float64 weight and float32 otherwise, like PEFT's with ``autocast_adapter_dtype=True``.
    """
    for target in targets:
        base = params.version(target.weight)
        dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
        a = torch.empty(r, target.in_features, dtype=dtype, device=base.device)
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        b = torch.zeros(target.out_features, r, dtype=dtype, device=base.device)
        # Tied layers have one adapter under the names of each.
        aliases = zip(*map(_names, target.modules[1:]), strict=True) if len(target.modules) > 1 else ((), ())
        for name, tensor, others in zip(names(target), (a, b), aliases, strict=True):
            params.add(name, tensor, aliases=others)


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """``weight + scaling * B @ A`` in the weight's dtype, rounded once."""
    delta = (b @ a) * scaling
    return (weight.to(delta.dtype) + delta.to(weight.device)).to(weight.dtype)
