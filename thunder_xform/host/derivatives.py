"""Compiled backwards cannot be differentiated: ``create_graph=True`` is an error, not gradients that lack terms."""

from __future__ import annotations

from typing import Any

import torch

from thunder_xform.errors import PipelineError


def refuse_second_derivatives(outputs: Any) -> None:
    """Let the backward of a compiled call that returned ``outputs`` raise under ``create_graph=True``."""
    node = _node(outputs)
    if node is not None:
        node.register_prehook(_check)


def _check(gradients: Any) -> None:
    # PyTorch enables gradients in a backward only to record it.
    if torch.is_grad_enabled():
        raise PipelineError(
            "The backward of a compiled model is run with create_graph=True, but it cannot be differentiated again.",
            "Compute the gradient penalty with the plain model, or leave out create_graph.",
        )


def _node(outputs: Any) -> Any:
    """The compiled call in PyTorch's graph; one node for all outputs."""
    if isinstance(outputs, torch.Tensor):
        node = outputs.grad_fn
        return node if node is not None and type(node).__name__.startswith("Thunder") else None
    if isinstance(outputs, dict):
        outputs = outputs.values()
    elif not isinstance(outputs, (tuple, list)):
        outputs = getattr(outputs, "__dict__", {}).values()
    return next((node for node in map(_node, outputs) if node is not None), None)
