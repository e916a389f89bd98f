"""PiSSA: adapters that start as the principal part of a weight, and train in its place.

Source: Meng et al., "PiSSA: Principal Singular Values and Singular Vectors Adaptation", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

import thunder_xform as tx
from thunder_xform_lora._target import Target, tied_elsewhere


def decompose(target: Target, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A and B of the largest singular values, in float32 or float64, and the weight without their contribution."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    layer, exact = target.layer, weight.detach().to(dtype)
    u, s, vh = torch.linalg.svd(exact.T if layer.out_dim else exact, full_matrices=False)
    root = (s[: target.r] / target.scaling).sqrt()
    a, b = root[:, None] * vh[: target.r], u[:, : target.r] * root
    return a, b, (exact - target.scaling * layer.change(a, b)).to(weight.dtype)


def check(targets: Iterable[Target], params: tx.Parameters, ctx: tx.Context) -> None:
    """Refuse weights that cannot be decomposed, or that others read, too."""
    for target in targets:
        version = params.version(target.weight)
        if not target.decomposed:
            continue
        if version.layout != "dense":
            reason = f"which are stored as {version.layout!r}"
        elif params.tensor(target.weight).is_meta:
            reason = "which is on the meta device and has no data"
        elif tied := tied_elsewhere(target, ctx):
            reason = f"which are those of {tied[0]!r}, too"
        else:
            continue
        problem = f"`init_lora_weights` 'pissa' decomposes the weights of {target.modules[0]!r}, {reason}."
        remedy = f"Exclude {target.modules[0]!r}, or initialize otherwise."
        raise ctx.option_error("init_lora_weights", "pissa", problem, remedy)
