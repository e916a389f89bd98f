"""The adapters' part of the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import thunder_xform as tx
from thunder_xform_lora import _adapter, _dora
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
    by_weight = {target.weight: target for target in targets}

    def adapted(operation: tx.Operation, edit: tx.Edit) -> object:
        target = by_weight[str(operation.linear_weight)]
        result = operation.call()
        dtype = result.dtype
        # The order of operations and the dtypes are PEFT's.
        for adapter, weight in weights.items():
            names = _adapter.names(target, adapter, dora)
            a, b, *_ = map(edit.parameter, names)
            x = tx.ops.to(operation.args[0], a.dtype)
            if p := dropout(target):
                x = tx.ops.dropout(x, p, True)
            scaling = target.scaling * weight
            delta = tx.ops.linear(tx.ops.linear(x, a), b) * scaling
            if dora:
                result = _dora.apply(operation, edit, names, scaling, x if p else None, delta, result)
            else:
                result = result + delta
        return tx.ops.to(result, dtype)

    return computation.rewrite(lambda operation: operation.linear_weight in by_weight, adapted)


def applied_weights(computation: tx.Computation) -> frozenset[str]:
    """Names of the parameters that an operator of the trace applies as a weight matrix."""
    names = (operation.linear_weight for operation in computation.operations())
    return frozenset(name for name in names if name is not None)
