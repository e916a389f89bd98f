"""The norm of the whole gradient of a model whose parameters plugins distribute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from thunder_xform.errors import PipelineError, spell
from thunder_xform.parallel.norm import local_norm, whole_norm

if TYPE_CHECKING:
    from thunder_xform.host.version import Version
    from thunder_xform.pipeline.session import Session


def gradient_norm(session: Session, parameters: list[torch.nn.Parameter], norm_type: float) -> torch.Tensor:
    """The norm of the whole gradient of ``parameters``, all of the model's that train.

    Where plugins declared placements, parameters are DTensors and tell what lies elsewhere, whichever plugins cut them.
    A plugin that declared nothing is asked for the norm, and must be the only one that distributes.

    Raises:
        PipelineError: a plugin stores parameters that train in another form, where there are several ranks, and says
            nothing of their norm; or several plugins answer, each for its own part.
        ParallelError: the parts' norms of that order do not combine.
    """
    declaring, silent = _cutting(session)
    for index in silent:
        if not session.hooks.implements(index, "gradient_norm"):
            raise PipelineError(
                f"Plugin {session.names[index]!r} stores parameters that train in another form, but does not say what "
                f"the norm of their gradients over all ranks is.",
                "Leave it out, or let it pass mesh= and placement= to params.replace or implement the hook "
                "gradient_norm.",
                plugin=session.names[index],
            )
    _refuse_several(session, {*silent, *(declaring if silent else ())})
    answers: dict[int, torch.Tensor] = {}
    given = [p for p in parameters if p.grad is not None]
    for index in reversed(range(len(session.plugins))):
        if index not in declaring:
            norm = session.hooks.call(index, "gradient_norm", parameters=given, norm_type=norm_type)
            if norm is not None:
                answers[index] = norm
    _refuse_several(session, {*answers, *(declaring if answers else ())})
    if answers:
        return next(iter(answers.values()))
    if not any(isinstance(p, DTensor) for p in parameters):
        return local_norm(parameters, norm_type)
    return whole_norm(parameters, norm_type, lambda own: local_norm([parameters[i] for i in own], norm_type))


def _cutting(session: Session) -> tuple[set[int], list[int]]:
    """Positions of the plugins that cut parameters that train: those that said how, and those that did not."""
    ledger, several = session.ledger, _several_ranks()
    declaring, silent = set(), set()
    for name in ledger:
        if (latest := ledger.latest(name)).kind != "parameter" or not latest.requires_grad:
            continue
        for index in range(len(session.plugins)):
            before, after = ledger.at(name, index - 1), ledger.at(name, index)
            if before is None or after is None or _stored(before) == _stored(after):
                continue
            if any(isinstance(p.placement, Shard) and p.plugin == session.names[index] for p in after.placed):
                declaring.add(index)
            elif several:
                silent.add(index)
    return declaring, sorted(silent)


def _several_ranks() -> bool:
    """Whether other ranks can hold the rest of what this one stores."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _stored(version: Version) -> tuple[tuple[int, ...], str]:
    # A rank may hold all rows of a small parameter: the layout tells it that others hold none.
    return version.stored_shape, version.layout


def _refuse_several(session: Session, indices: set[int]) -> None:
    if len(indices) > 1:
        names = [session.names[index] for index in sorted(indices)]
        raise PipelineError(
            f"Plugins {spell([*map(repr, names)])} each distribute parameters, and each knows the norm of the "
            f"gradients of its own part only.",
            "Use one of them, or train without clipping by the norm.",
            plugins=names,
        )
