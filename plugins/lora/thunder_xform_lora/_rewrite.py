"""The adapters' part of the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import thunder_xform as tx
from thunder_xform_lora import _adapter
from thunder_xform_lora._targets import Target

#: Operators that apply a weight matrix to their first argument, and the position of that weight. All else
#: goes by the weights' names in the ledger, so an operator on packed weights needs only an entry here.
_WEIGHT_ARGUMENT = {"linear": 1}


def apply_adapters(
    computation: tx.Computation, targets: Iterable[Target], scaling: float, dropout: Callable[[Target], float]
) -> tx.Computation:
    """Add to every application of a target's weight what its adapter contributes.

    Args:
        computation: the trace before differentiation.
        targets: the weights with adapters.
        scaling: factor of the adapters' output.
        dropout: the probability, now, for a target.
    """
    by_weight = {target.weight: target for target in targets}

    def adapted(operation: tx.Operation, edit: tx.Edit) -> object:
        weight = operation.parameter(_WEIGHT_ARGUMENT[operation.name])
        target = by_weight.get(weight) if weight else None
        if target is None:
            return None
        a, b = map(edit.parameter, _adapter.names(target))
        result = operation.call()
        # The order of operations and the dtypes are PEFT's.
        x = tx.ops.to(operation.args[0], a.dtype)
        if p := dropout(target):
            x = tx.ops.dropout(x, p, True)
        delta = tx.ops.linear(tx.ops.linear(x, a), b) * scaling
        return tx.ops.to(result + delta, result.dtype)

    for name in _WEIGHT_ARGUMENT:
        computation = computation.rewrite(name, adapted)
    return computation


def applied_weights(computation: tx.Computation) -> frozenset[str]:
    """Names of the parameters that an operator of the trace applies as a weight matrix."""
    applications = (o for o in computation.operations() if o.name in _WEIGHT_ARGUMENT)
    names = (o.parameter(_WEIGHT_ARGUMENT[o.name]) for o in applications)
    return frozenset(name for name in names if name is not None)
