"""Which kinds of layers can get an adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import thunder_xform as tx
from thunder_xform_lora._convolution import Conv1d, Conv2d, Conv3d
from thunder_xform_lora._embedding import Embedding
from thunder_xform_lora._layer import Layer
from thunder_xform_lora._linear import Linear, TransposedLinear

_OF_MODULE: tuple[tuple[type[torch.nn.Module], Callable[[Any], Layer]], ...] = (
    (torch.nn.Linear, Linear),
    (torch.nn.Embedding, Embedding),
    (torch.nn.Conv1d, Conv1d),
    (torch.nn.Conv2d, Conv2d),
    (torch.nn.Conv3d, Conv3d),
)
#: The same for errors.
SUPPORTED = "torch.nn.Linear, Embedding, Conv1d, Conv2d, Conv3d or transformers' Conv1D"


def layer_of(module: torch.nn.Module) -> Layer | None:
    """The module as a layer that can get an adapter; None if it is no such layer."""
    for kind, make in _OF_MODULE:
        if isinstance(module, kind):
            return make(module)
    # A model can only hold such a layer if transformers is imported.
    transformers = sys.modules.get("transformers.pytorch_utils")
    return TransposedLinear(module) if transformers and isinstance(module, transformers.Conv1D) else None


def is_linear(module: torch.nn.Module) -> bool:
    """Whether "all-linear" means the module."""
    layer = layer_of(module)
    return layer is not None and layer.linear


def applied(operation: tx.Operation) -> tuple[type[Layer], str] | None:
    """The kind of layer that a call is of, and the name of the weight that it applies."""
    for kind in (Linear, TransposedLinear, Embedding, Conv1d, Conv2d, Conv3d):
        if weight := kind.weight_of(operation):
            return kind, weight
    return None
