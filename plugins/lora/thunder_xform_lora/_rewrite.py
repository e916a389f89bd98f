"""The adapters' part of the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import thunder_xform as tx
from thunder_xform_lora import _adapter, _dora
from thunder_xform_lora._kinds import applied
from thunder_xform_lora._layer import Layer
from thunder_xform_lora._targets import Target


def apply_adapters(
    computation: tx.Computation,
    targets: Iterable[Target],
    weights: Mapping[str, float],
    dropout: Callable[[Target], float],
    dora: bool,
) -> tx.Computation:
    """Add to every application of a target's weight what its adapters contribute.

    Args:
        computation: the trace before differentiation.
        targets: the weights with adapters.
        weights: of the active adapters, by name.
        dora: whether adapters learn the lengths of rows apart.
        dropout: the probability, now, for a target.
    """
    by_key = {target.key: target for target in targets}

    def adapted(operation: tx.Operation, edit: tx.Edit) -> object:
        target = by_key[applied(operation)]  # type: ignore[index]
        layer, result = target.layer, operation.call()
        dtype = result.dtype
        # The order of operations and the dtypes are PEFT's.
        for adapter, weight in weights.items():
            a, b = map(edit.parameter, _adapter.names(target, adapter))
            x, p, scaling = layer.input(operation, a.dtype), dropout(target), target.scaling * weight
            if p:
                x = tx.ops.dropout(x, p, True)
            delta = layer.output(operation, x, a, b) * scaling
            if dora:
                factor = _dora.factor(edit, target, adapter, scaling)
                bare = _dora.bare(edit, target, operation, result, x if p else None)
                delta = (factor - 1) * bare + factor * delta
            result = result + delta
        return tx.ops.to(result, dtype)

    return computation.rewrite(lambda operation: applied(operation) in by_key, adapted)


def applied_weights(computation: tx.Computation) -> frozenset[tuple[type[Layer], str]]:
    """Kinds of layers in the trace, each with a parameter that such a layer applies as its weight."""
    found = (applied(operation) for operation in computation.operations())
    return frozenset(key for key in found if key is not None)
