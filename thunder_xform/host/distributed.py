"""This rank's parts of distributed parameters, as the prologue unpacks them: connected to the DTensors by autograd.

The user holds DTensors; the trace reads what each stores on this rank. One autograd node a call stands between them, so
gradients, hooks, ``torch.autograd.grad`` and ``requires_grad`` are those of the DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_xform.host.ledger import Ledger
from thunder_xform.host.operators import python_call


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Any) -> tuple[torch.Tensor, ...]:
        ctx.like = [(type(p), p._spec) for p in parameters]
        ctx.set_materialize_grads(False)
        # Fresh aliases, since autograd marks what is returned; a change of a parameter counts as one of its alias.
        return tuple([p._local_tensor.detach() for p in parameters])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            [
                None if gradient is None else cls(gradient, spec, requires_grad=False)
                for (cls, spec), gradient in zip(ctx.like, gradients, strict=True)
            ]
        )


def parts(ledger: Ledger, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """The stored tensors of distributed parameters, for one call of the model."""
    found: list[torch.Tensor] = []
    trained: list[tuple[int, torch.nn.Parameter]] = []
    for name in names:
        parameter, stored = ledger.distributed(name), ledger.tensor(name)
        assert parameter is not None
        if stored.requires_grad != parameter.requires_grad:
            stored.requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            trained.append((len(found), parameter))
        found.append(stored)
    if trained and torch.is_grad_enabled():
        connected = _Parts.apply(*[parameter for _, parameter in trained])
        for (position, _), part in zip(trained, connected, strict=True):
            found[position] = part
    return tuple(found)


#: ``unpack_parts(module, *names) -> stored tensors``, in prologues.
unpack_parts = python_call("unpack_parts", lambda module, *names: parts(module._ledger, names), returns=True)
