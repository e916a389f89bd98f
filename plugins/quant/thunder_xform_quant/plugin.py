"""The ``quant`` plugin: hooks that pack weights, compute with them, and carry them through checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

import thunder_xform as tx
from thunder_xform_quant import _operators
from thunder_xform_quant._schemes import find_scheme
from thunder_xform_quant._targets import find_weights
from thunder_xform_quant._weight import QuantizedWeight
from thunder_xform_quant.options import Options


class Quant(tx.Plugin[Options]):
    """Weights of linear layers in few bits, frozen; gradients flow through them. All other parameters stay as they are.

    A weight ``w`` becomes its codes, under its own name, and what else its scheme needs, ``w.absmax`` say. Plugins that
    shard the model cut all of these by rows.
    """

    _weights: dict[str, QuantizedWeight]

    @tx.hookimpl
    def update_model_state(self, params: tx.Parameters, ctx: tx.Context) -> None:
        scheme = find_scheme(self.options, ctx)
        names = find_weights(self.options, params, ctx)
        dtype = getattr(torch, self.options.compute_dtype) if self.options.compute_dtype else None
        self._weights = {}
        for name in names:
            tensor = params.tensor(name).detach()
            packed = scheme.quantize(tensor)
            weight = QuantizedWeight(name, scheme, tensor, dtype, packed)
            for part, value in weight.split(packed).items():
                if part == name:
                    params.replace(
                        name, value, layout=repr(scheme), requires_grad=False, decode=_decoding(weight, params)
                    )
                else:
                    kind: Literal["parameter", "buffer"] = "buffer" if part in weight.buffers else "parameter"
                    params.add(part, value, kind=kind, requires_grad=False, layout=repr(scheme))
            self._weights[name] = weight
        if self.options.release_originals:
            params.release_originals()

    @tx.hookimpl
    def before_autograd(self, computation: tx.Computation) -> tx.Computation:
        # Whoever reads the value of a weight gets it dequantized. Linear layers then take the packed tensors instead;
        # Thunder drops dequantizations whose result nobody reads any more.
        used = [self._weights[name] for name in computation.parameters if name in self._weights]
        computation = computation.restore([(weight.names, _restoring(weight)) for weight in used], recompute=True)
        return computation.rewrite(
            lambda o: o.name == "linear" and o.linear_weight in self._weights, self._packed_linear
        )

    def _packed_linear(self, operation: tx.Operation, edit: tx.Edit) -> object:
        weight = self._weights[str(operation.linear_weight)]
        codes, *others = map(edit.stored, weight.names)
        x, _, bias = operation.args
        # Under autocast a linear layer casts its input.
        return _operators.linear(tx.ops.to(x, operation.output.dtype), codes, bias, weight, *others)

    @tx.hookimpl
    def export_state(self, state: dict[str, torch.Tensor], ctx: tx.Context) -> dict[str, torch.Tensor] | None:
        """Full: dequantized. Otherwise as they are."""
        if ctx.state_kind != "full":
            return None
        state = dict(state)
        for name, weight in self._weights.items():
            tensors = [state.pop(part) for part in weight.names]
            state[name] = weight.dequantize(*tensors)
        return state

    @tx.hookimpl
    def import_state(self, state: dict[str, torch.Tensor], ctx: tx.Context) -> dict[str, torch.Tensor] | None:
        """Full: the weights given, quantized. Otherwise as they are."""
        if ctx.state_kind != "full":
            return None
        state = dict(state)
        for name, weight in self._weights.items():
            if name in state:
                value = state[name]
                if not value.is_floating_point() or not bool(value.isfinite().all()):
                    raise tx.errors.CheckpointError(
                        f"{name!r} cannot be quantized: it is {value.dtype}, or has entries that are infinite or NaN.",
                        "Load a floating-point state, or a quantized one with kind='sharded'.",
                        key=name,
                    )
                value = value.to(ctx.version(name).device, weight.dtype)
                state |= weight.split(weight.scheme.quantize(value))
        return state


def _restoring(weight: QuantizedWeight) -> Callable[..., Any]:
    unread = (None,) * (len(weight.names) - 1)
    return lambda *tensors: (_operators.dequantize(weight, *tensors), *unread)


def _decoding(weight: QuantizedWeight, params: tx.Parameters) -> Callable[[], torch.Tensor]:
    return lambda: weight.dequantize(*map(params.tensor, weight.names))
