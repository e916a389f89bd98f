"""Does a transformed model compute what the plain one computes?"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import thunder
import torch
from torch.utils._pytree import tree_flatten

from thunder_xform.pipeline import Pipeline


def assert_same_numerics(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    pipeline: Pipeline,
    *,
    kwargs: Mapping[str, Any] | None = None,
    reference: torch.nn.Module | None = None,
    atol: float = 1e-6,
    rtol: float = 1e-5,
    calls: int = 1,
) -> Any:
    """Compile ``model`` with ``pipeline`` and compare with eager PyTorch.

    Compared after each call: all outputs, the gradients (of a loss that weighs every element of every output
    differently) of all parameters that train in the compiled model, and all buffers. The names, values and
    flags of the user's module's tensors must survive ``thunder.jit`` bitwise. Nothing random can be compared:
    Thunder draws other numbers than eager PyTorch.

    Args:
        model: the plain model.
        inputs: positional arguments.
        pipeline: fresh, from ``registry.resolve`` or :func:`thunder_xform.testing.pipeline_of`.
        kwargs: keyword arguments.
        reference: eager model that computes what the transformed one should; by default a copy of ``model``.
            Gradients and buffers are compared where it has one of that name.
        atol: absolute tolerance.
        rtol: relative tolerance.
        calls: how many forward and backward passes to compare; gradients accumulate.

    Returns:
        The compiled model.

    Raises:
        AssertionError: naming what differs and by how much.
    """
    kwargs = {} if kwargs is None else kwargs
    expected = copy.deepcopy(model) if reference is None else reference
    before = _tensors(model)
    compiled: Any = thunder.jit(model, transforms=pipeline)
    after = _tensors(model)
    assert after.keys() == before.keys(), f"The user's module gained or lost {sorted(after.keys() ^ before.keys())}."
    for name, (tensor, copied, flag) in before.items():
        assert after[name][0] is tensor, f"The user's module holds another {name!r}."
        assert torch.equal(tensor, copied), f"{name!r} of the user's module changed its value."
        assert after[name][2] == flag, f"{name!r} of the user's module changed requires_grad from {flag}."
    for _ in range(calls):
        wanted = _leaves_after_backward(expected(*inputs, **kwargs))
        found = _leaves_after_backward(compiled(*inputs, **kwargs))
        assert found[1] == wanted[1], f"The outputs form {found[1]}, those of eager {wanted[1]}."
        for index, (ours, theirs) in enumerate(zip(found[0], wanted[0], strict=True)):
            _compare(ours, theirs, f"output {index}", atol, rtol)
        plain = dict(chain(expected.named_parameters(remove_duplicate=False), expected.named_buffers()))
        for name, parameter in compiled.named_parameters():
            if parameter.requires_grad and name in plain and plain[name].requires_grad:
                _compare(parameter.grad, plain[name].grad, f"gradient of {name!r}", atol, rtol)
        for name, buffer in compiled.named_buffers():
            if name in plain:
                _compare(buffer, plain[name], f"buffer {name!r}", atol, rtol)
    return compiled


def _tensors(module: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor, bool]]:
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: (tensor, tensor.detach().clone(), tensor.requires_grad) for name, tensor in named}


def _leaves_after_backward(outputs: Any) -> tuple[list[Any], Any]:
    leaves, form = tree_flatten(outputs)
    loss = _weighed(leaves)
    if loss is not None:
        loss.backward()
    return leaves, form


def _weighed(leaves: Iterable[Any]) -> torch.Tensor | None:
    """A scalar that depends on every element of the differentiable outputs, on each with another weight."""
    loss = None
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weights = torch.linspace(0.5 + number, 1.5 + number, leaf.numel(), device=leaf.device)
            term = (leaf * weights.to(leaf.dtype).view(leaf.shape)).sum()
            loss = term if loss is None else loss + term
    return loss


def _compare(ours: Any, theirs: Any, what: str, atol: float, rtol: float) -> None:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(
            ours.detach(),
            theirs.detach(),
            atol=atol,
            rtol=rtol,
            msg=lambda text: f"The {what} differs from eager's.\n{text}",
        )
    else:
        assert ours == theirs, f"The {what} is {ours!r}, that of eager {theirs!r}."
