"""What the backward under way is going to do with ``.grad``."""

from __future__ import annotations

import torch


def accumulates(parameter: torch.Tensor) -> bool:
    """Whether the backward under way adds to ``parameter.grad``. Call it only from within a backward.

    False in ``torch.autograd.grad``, and in ``backward(inputs=...)`` for parameters that are not among the inputs: they
    leave ``.grad`` as it is.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        # The answer for a leaf whose gradient torch.autograd.grad returns.
        if "autograd.grad()" in str(error):
            return False
        raise
