"""Adapter tensors: their names, their initial values, and what they amount to."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

import thunder_xform as tx
from thunder_xform_lora._targets import Target

#: The adapter's name, part of its tensors' names. PEFT, too, calls the first one so.
ADAPTER = "default"


def names(target: Target) -> tuple[str, str]:
    """Names of A and B, as in a PEFT model: ``<module>.lora_A.<adapter>.weight``, and so for ``lora_B``."""
    return _names(target.modules[0])


def _names(module: str) -> tuple[str, str]:
    prefix = f"{module}." if module else ""
    return f"{prefix}lora_A.{ADAPTER}.weight", f"{prefix}lora_B.{ADAPTER}.weight"


def add(targets: Iterable[Target], r: int, params: tx.Parameters) -> None:
    """Add A and B of each target, initialized as by PEFT: A like the weight of a torch.nn.Linear, B zero.

    They are float64 for a float64 weight, otherwise float32, as PEFT's are (``autocast_adapter_dtype``).
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
