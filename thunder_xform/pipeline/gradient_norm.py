"""The norm of the whole gradient of a model whose parameters plugins distribute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from thunder_xform.errors import PipelineError, spell

if TYPE_CHECKING:
    from thunder_xform.host.version import Version
    from thunder_xform.pipeline.session import Session


def gradient_norm(session: Session, parameters: list[torch.nn.Parameter], norm_type: float) -> torch.Tensor:
    """The norm of the whole gradient of ``parameters``: from the plugin that distributes them, else plainly.

    Raises:
        PipelineError: a plugin stores parameters that train in another form, where there are several ranks, and says
            nothing of their norm; or several plugins answer, each for its own part.
    """
    cutting = _cutting(session)
    for index in cutting:
        if not session.hooks.implements(index, "gradient_norm"):
            raise PipelineError(
                f"Plugin {session.names[index]!r} stores parameters that train in another form, but does not say what "
                f"the norm of their gradients over all ranks is.",
                "Leave it out, or let it implement the hook gradient_norm.",
                plugin=session.names[index],
            )
    _refuse_several(session, cutting)
    answers: dict[int, torch.Tensor] = {}
    for index in reversed(range(len(session.plugins))):
        norm = session.hooks.call(index, "gradient_norm", parameters=parameters, norm_type=norm_type)
        if norm is not None:
            answers[index] = norm
    _refuse_several(session, sorted(answers))
    if answers:
        return next(iter(answers.values()))
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)


def _cutting(session: Session) -> list[int]:
    """Positions of the plugins that may store parts of parameters that train, where other ranks can hold the rest."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    ledger = session.ledger
    found = set()
    for name in ledger:
        if (latest := ledger.latest(name)).kind != "parameter" or not latest.requires_grad:
            continue
        for index in range(len(session.plugins)):
            before, after = ledger.at(name, index - 1), ledger.at(name, index)
            if before is not None and after is not None and _stored(before) != _stored(after):
                found.add(index)
    return sorted(found)


def _stored(version: Version) -> tuple[tuple[int, ...], str]:
    # A rank may hold all rows of a small parameter: the layout tells it that others hold none.
    return version.stored_shape, version.layout


def _refuse_several(session: Session, indices: list[int]) -> None:
    if len(indices) > 1:
        names = [session.names[index] for index in indices]
        raise PipelineError(
            f"Plugins {spell([*map(repr, names)])} each distribute parameters, and each knows the norm of the "
            f"gradients of its own part only.",
            "Use one of them, or train without clipping by the norm.",
            plugins=names,
        )
