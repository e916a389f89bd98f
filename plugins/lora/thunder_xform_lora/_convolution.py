"""Adapters of convolutions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import thunder_xform as tx
from thunder_xform_lora._layer import Layer
from thunder_xform_lora.options import Options

#: What Thunder's autocast makes of all convolutions.
_PRIMITIVE = "convolution"


class Convolution(Layer):
    """A convolution: A is one of the same kernel, stride and padding to r channels, B one of kernel 1 from there.

    A has the shape (r, in_channels, *kernel_size). B has (out_channels, r / groups, 1, ...): as in PEFT, groups are B's
    alone.
    """

    #: name of the operator, and how many dimensions a kernel has
    name: ClassVar[str]
    dims: ClassVar[int]

    def __init__(self, module: torch.nn.modules.conv._ConvNd) -> None:
        super().__init__(module.in_channels, module.out_channels, tuple(module.weight.shape))
        self._kernel = tuple(module.kernel_size)
        self._groups = module.groups
        # PEFT makes A without these, and then the layer and its adapter see different parts of the input.
        odd = [f"dilation={module.dilation}"] if max(module.dilation) > 1 else []
        self._odd = odd + [f"padding_mode={module.padding_mode!r}"] * (module.padding_mode != "zeros")

    @classmethod
    def weight_of(cls, operation: tx.Operation) -> str | None:
        fits = operation.operator is None and (
            operation.name == cls.name
            or (operation.name == _PRIMITIVE and not operation.args[6] and operation.args[1].ndim == cls.dims + 2)
        )
        return operation.parameter(1) if fits else None

    def refusal(self, r: int, options: Options) -> str | None:
        if self._odd:
            return f"has {self._odd[0]}, which PEFT's adapters cannot follow"
        if r % self._groups:
            return f"has {self._groups} groups, but `r` is {r}, which these do not divide"
        if options.use_dora and self._groups > 1:
            return f"has {self._groups} groups, and `use_dora` goes with one"
        if options.init_lora_weights == "pissa":
            return "is a convolution, which init_lora_weights='pissa' does not go with"
        return None

    @property
    def unmergeable(self) -> str | None:
        return "its adapter connects channels of different groups" if self._groups > 1 else None

    def shapes(self, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        pointwise = (1,) * len(self._kernel)
        return (r, self.in_features, *self._kernel), (self.out_features, r // self._groups, *pointwise)

    def output(self, operation: tx.Operation, x: Any, a: Any, b: Any, scaling: float) -> Any:
        convolve = getattr(tx.ops, self.name)
        stride, padding, _, groups = _settings(operation)
        return convolve(convolve(x, a, None, stride, padding) * scaling, b, groups=groups)

    def plain(self, operation: tx.Operation, x: Any, weight: Any) -> Any:
        return getattr(tx.ops, self.name)(x, weight, None, *_settings(operation))

    def spread(self, features: Any) -> Any:
        return tx.ops.reshape(features, (self.out_features, *[1] * len(self._kernel)))

    def change(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (b.flatten(1) @ a.flatten(1)).reshape(self.shape)

    def lengths(self, weight: torch.Tensor) -> torch.Tensor:
        return super().lengths(weight).reshape(1, self.out_features, *[1] * len(self._kernel))


def _settings(operation: tx.Operation) -> tuple[Any, Any, Any, int]:
    """Stride, padding, dilation and groups of a call."""
    stride, padding, dilation, *_, groups = operation.args[3:]
    return stride, padding, dilation, groups


class Conv1d(Convolution):
    """``torch.nn.Conv1d``."""

    name = "conv1d"
    dims = 1
    function = "torch.nn.functional.conv1d"


class Conv2d(Convolution):
    """``torch.nn.Conv2d``."""

    name = "conv2d"
    dims = 2
    function = "torch.nn.functional.conv2d"


class Conv3d(Convolution):
    """``torch.nn.Conv3d``."""

    name = "conv3d"
    dims = 3
    function = "torch.nn.functional.conv3d"
