"""The ``aten`` plugin: operators of the model become calls of kernels, with gradient rules that call kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import thunder_xform as tx
from thunder_xform_aten._activations import gelu, relu, silu
from thunder_xform_aten._attention import attention
from thunder_xform_aten._norms import layer_norm, rms_norm
from thunder_xform_aten._splits import split, unbind
from thunder_xform_aten.options import Options

_KERNELS: Mapping[str, Callable[[tx.Operation], Any]] = {
    "chunk": split,
    "gelu": gelu,
    "layer_norm": layer_norm,
    "relu": relu,
    "rms_norm": rms_norm,
    "scaled_dot_product_attention": attention,
    "silu": silu,
    "tensor_split": split,
    "unbind": unbind,
}


class Aten(tx.Plugin[Options]):
    """Computes what the model computes, on PyTorch's kernels. Parameters and everything else stay as they are."""

    @tx.hookimpl
    def before_autograd(self, computation: tx.Computation) -> tx.Computation:
        return computation.rewrite(
            lambda operation: operation.operator is None and operation.name in self.options.operators,
            lambda operation, edit: _KERNELS[operation.name](operation),
        )
