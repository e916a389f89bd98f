"""Gradients of a model on several ranks against eager PyTorch in one process over the data of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from thunder_xform.pipeline import handle

#: ``loss(model, batch)``, a scalar.
Loss = Callable[[Any, Any], torch.Tensor]


def reduce_each(model: Any, loss: Loss, batches: Sequence[Any]) -> None:
    """Reduce gradients in every backward."""
    for batch in batches:
        loss(model, batch).backward()


def one_context(model: Any, loss: Loss, batches: Sequence[Any]) -> None:
    """One ``no_sync`` around all but the last microbatch."""
    with model.no_sync():
        reduce_each(model, loss, batches[:-1])
    reduce_each(model, loss, batches[-1:])


def context_per_batch(model: Any, loss: Loss, batches: Sequence[Any]) -> None:
    """``no_sync`` entered and left for every microbatch but the last, as Fabric and Accelerate do."""
    for batch in batches[:-1]:
        with model.no_sync():
            reduce_each(model, loss, [batch])
    reduce_each(model, loss, batches[-1:])


def ends_inside(model: Any, loss: Loss, batches: Sequence[Any]) -> None:
    """All microbatches inside ``no_sync``, then ``sync_gradients``."""
    with model.no_sync():
        reduce_each(model, loss, batches)
    handle(model).sync_gradients()


def syncs_in_between(model: Any, loss: Loss, batches: Sequence[Any]) -> None:
    """``no_sync`` around all but the first and the last microbatch."""
    reduce_each(model, loss, batches[:1])
    if batches[1:]:
        one_context(model, loss, batches[1:])


def left_by_exception(model: Any, loss: Loss, batches: Sequence[Any]) -> None:
    """An exception ends every ``no_sync``."""
    for batch in batches[:-1]:
        with contextlib.suppress(ZeroDivisionError), model.no_sync():
            reduce_each(model, loss, [batch])
            raise ZeroDivisionError
    reduce_each(model, loss, batches[-1:])


#: Ways to accumulate that must all give the same gradients, by name.
STYLES: Mapping[str, Callable[[Any, Loss, Sequence[Any]], None]] = {
    style.__name__: style
    for style in (reduce_each, one_context, context_per_batch, ends_inside, syncs_in_between, left_by_exception)
}


def accumulate_eager(plain: torch.nn.Module, loss: Loss, batches: Sequence[Sequence[Any]]) -> None:
    """Leave in ``plain`` what data parallel training gives: means over ranks, summed over microbatches.

    Args:
        plain: the plain model; its gradients are reset first.
        loss: the loss of one batch.
        batches: ``batches[microbatch][rank]``.
    """
    plain.zero_grad()
    for per_rank in batches:
        for batch in per_rank:
            (loss(plain, batch) / len(per_rank)).backward()


def own_rows(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """What this rank holds of ``tensor`` if it is cut along its first dimension as ``torch.chunk`` does.

    A scalar is one row.
    """
    rows = tensor.reshape(1) if not tensor.ndim else tensor
    pieces = rows.chunk(dist.get_world_size(group)) if len(rows) else ()
    rank = dist.get_rank(group)
    return pieces[rank] if rank < len(pieces) else rows[:0]


def gradient_errors(model: Any, plain: torch.nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Largest absolute difference between the gradients of ``model`` and those of ``plain``, by parameter.

    Parameters of ``plain`` without a gradient must have none in ``model`` and the other way round; a shape other than
    the whole one must be that of :func:`own_rows` over ``group``. Either counts as infinitely wrong.
    """
    errors = {}
    expected = dict(plain.named_parameters())
    for name, parameter in handle(model).parameters.items():
        wanted, found = expected[name].grad, parameter.grad
        if wanted is None or found is None:
            errors[name] = 0.0 if wanted is found else float("inf")
            continue
        if isinstance(found, DTensor):
            found = found.redistribute(placements=parameter.placements).to_local()  # type: ignore[attr-defined]
        if found.shape != wanted.shape:
            wanted = own_rows(wanted, group)
        if found.shape != wanted.shape or found.dtype != parameter.dtype:
            errors[name] = float("inf")
        else:
            difference = (found.double() - wanted.double()).abs()
            errors[name] = difference.max().item() if difference.numel() else 0.0
    return errors
