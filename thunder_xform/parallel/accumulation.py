"""The backward under way: what it does with ``.grad``, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class _Probe(torch.autograd.Function):
    """Leads to the nodes that accumulate gradients of its inputs, whatever kinds of tensors those are."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


def accumulates(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Whether the backward under way adds to ``.grad``, for each parameter. Call it only from within a backward.

    False in ``torch.autograd.grad``, and in ``backward(inputs=...)`` for parameters that are not among the inputs: they
    leave ``.grad`` as it is. False for those that are frozen.
    """
    if not any(parameter.requires_grad for parameter in parameters):
        return [False] * len(parameters)
    with torch.enable_grad():
        found: Any = _Probe.apply(*parameters).grad_fn
    return [node is not None and _runs(node) for node, _ in found.next_functions]


def _runs(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        # The answer for a leaf whose gradient torch.autograd.grad returns.
        if "autograd.grad()" in str(error):
            return False
        raise


class AfterBackward:
    """Runs a function once at the end of the backward under way, if that succeeds."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._backward = -1

    def request(self) -> None:
        """Have the function run. Call it only from within a backward; once or often makes no difference."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._run)
