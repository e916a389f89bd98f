"""Ranks, and the comparison with eager PyTorch of a function of tensors."""

from __future__ import annotations

import thunder_xform as tx  # Before Thunder.

# isort: split

import copy
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch

from thunder_xform.testing.fixtures import ranks

__all__ = ["ranks"]


class Calls(torch.nn.Module):
    """A function of tensors as a model: its floating-point tensors are parameters, of which some may be frozen."""

    def __init__(self, fn: Callable[..., Any], tensors: dict[str, torch.Tensor], trains: set[str] | None) -> None:
        super().__init__()
        self.fn = fn
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                flag = trains is None or name in trains
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=flag))
            else:
                self.register_buffer(name, tensor)
        self.names = tuple(tensors)

    def forward(self) -> Any:
        return self.fn(*[getattr(self, name) for name in self.names])


def operators(compiled: Any) -> list[str]:
    """Names of the operators called in the forward and the backward of the last call, in order."""
    traces = [*thunder.last_traces(compiled)[-1:], *(thunder.last_backward_traces(compiled) or ())[-1:]]
    return [bsym.sym.name for trace in traces for bsym in trace.bound_symbols]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def compare(
    fn: Callable[..., Any], trains: set[str] | None = None, atol: float = 0, rtol: float = 0, **tensors: torch.Tensor
) -> list[str]:
    """Check that outputs and gradients are eager PyTorch's; returns the names of the operators that ran."""
    model = Calls(fn, tensors, trains)
    eager = copy.deepcopy(model)
    compiled = thunder.jit(model, transforms=tx.registry.resolve(["aten"]))
    found, expected = (out if isinstance(out, tuple) else (out,) for out in (compiled(), eager()))
    assert [out.dtype for out in found] == [out.dtype for out in expected]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, equal_nan=True)
    if any(out.requires_grad for out in expected):
        for outputs in (found, expected):
            sum((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outputs).backward()
    for name, parameter in eager.named_parameters():
        own = compiled.get_parameter(name).grad
        if parameter.grad is None:
            assert own is None or not own.any(), name
        else:
            torch.testing.assert_close(own, parameter.grad, atol=atol, rtol=rtol, equal_nan=True)
    return operators(compiled)


@pytest.fixture(scope="session")
def like_eager() -> Callable[..., list[str]]:
    """``like_eager(fn, trains=None, atol=0, rtol=0, **tensors)``: see :func:`compare`; exact by default."""
    return compare


@pytest.fixture(scope="session")
def calls() -> type[Calls]:
    return Calls


@pytest.fixture(scope="session")
def ran() -> Callable[[Any], list[str]]:
    """``ran(compiled)``: see :func:`operators`."""
    return operators
