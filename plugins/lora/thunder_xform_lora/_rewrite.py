"""The adapters' part of the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import thunder_xform as tx
from thunder_xform_lora import _dora
from thunder_xform_lora._kinds import applied
from thunder_xform_lora._layer import Layer
from thunder_xform_lora._target import Target


def apply_adapters(
    computation: tx.Computation, targets: Iterable[tuple[Target, float]], dropout: Callable[[Target], float]
) -> tx.Computation:
    """Add to every application of a target's weight what its adapters contribute.

    Args:
        computation: the trace before differentiation.
        targets: those of the active adapters, each with the weight of its adapter.
        dropout: the probability, now, for a target.
    """
    by_key: dict[object, list[tuple[Target, float]]] = {}
    for target, weight in targets:
        by_key.setdefault(target.key, []).append((target, weight))

    def adapted(operation: tx.Operation, edit: tx.Edit) -> object:
        result = operation.call()
        dtype = result.dtype
        # The order of operations and the dtypes are PEFT's.
        for target, weight in by_key[applied(operation)]:
            layer, scaling, p = target.layer, target.scaling * weight, dropout(target)
            a, b, *magnitude = map(edit.parameter, target.names)
            x = layer.input(operation, a.dtype)
            if p:
                x = tx.ops.dropout(x, p, True)
            delta = layer.output(operation, x, a, b, scaling)
            if magnitude:
                factor = _dora.factor(edit, target, scaling)
                bare = _dora.bare(edit, target, operation, result, x if p else None)
                delta = (factor - 1) * bare + factor * delta
            result = result + delta
        return tx.ops.to(result, dtype)

    return computation.rewrite(lambda operation: applied(operation) in by_key, adapted)


def applied_weights(computation: tx.Computation) -> frozenset[tuple[type[Layer], str]]:
    """Kinds of layers in the trace, each with a parameter that such a layer applies as its weight."""
    found = (applied(operation) for operation in computation.operations())
    return frozenset(key for key in found if key is not None)
