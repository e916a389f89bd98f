"""One call of a module in eager PyTorch or compiled, with all its gradients, that leaves no trace of itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

_DROPOUTS = (torch.nn.functional.dropout, torch.dropout)


@dataclass
class Outcome:
    """What a call computed.

    Attributes:
        form: how the outputs nest.
        outputs: the leaves of the outputs; tensors detached.
        inputs: gradients of the arguments that want one.
        gradients: gradients of parameters, by name; None where none arrives.
        buffers: buffers after the call, by name.
        random: states of the random number generators after the call.
    """

    form: Any
    outputs: list[Any]
    inputs: list[torch.Tensor | None]
    gradients: dict[str, torch.Tensor | None]
    random: list[torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def outcome(call: Callable[..., Any], args: Any, kwargs: Any, parameters: Mapping[str, torch.Tensor]) -> Outcome:
    """Call on copies of the arguments; differentiate a scalar as it is, other outputs weighed by seeded numbers.

    ``.grad`` is left alone, and no gradient reaches hooks of parameters.
    """
    args, kwargs = copied((args, kwargs))
    outputs, form = tree_flatten(call(*args, **kwargs))
    random = random_states()
    given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    wanted = list(dict.fromkeys(given))
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    ends = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * (len(wanted) + len(trained))
    if ends and found:
        with _without_hooks(trained.values()):
            found = torch.autograd.grad(ends, [*wanted, *trained.values()], _weights(ends), allow_unused=True)
    leaves = [t.detach() if isinstance(t, torch.Tensor) else t for t in outputs]
    gradients = dict(zip(trained, found[len(wanted) :], strict=True))
    return Outcome(form, leaves, list(found[: len(wanted)]), gradients, random)


def _weights(ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.ones_like(t)
        if t.dim() == 0
        else torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device, t.dtype)
        for t in ends
    ]


def copied(tree: Any) -> Any:
    """A tree of arguments with copies of its tensors; one that occurs twice is copied once."""
    made: dict[int, torch.Tensor] = {}

    def copy_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return made[id(value)]

    return tree_map(copy_of, tree)


def random_states() -> list[torch.Tensor]:
    """States of torch's generators: the CPU's, and those of CUDA devices in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def set_random_states(states: Sequence[torch.Tensor]) -> None:
    """Undo what was drawn since :func:`random_states`."""
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(list(states[1:]))


@contextlib.contextmanager
def _without_hooks(parameters: Any) -> Iterator[None]:
    """Hooks of the user's on parameters do not run: they may count, print or step."""
    hooked = [(p, hooks) for p in parameters if (hooks := p._backward_hooks)]
    try:
        for parameter, _ in hooked:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks


@contextlib.contextmanager
def untouched(module: ThunderModule) -> Iterator[None]:
    """What calls change in a transformed model, in the user's module and in random states is undone."""
    random = random_states()
    holders = [part.__dict__ for part in module._model.modules()]
    nested = [h[key] for h in holders for key in ("_buffers", "_parameters")]
    places = [*holders, *nested, module._overrides_buffers, module._overrides_parameters]
    before = [(place, dict(place)) for place in places]
    held = (*module._overrides_buffers.values(), *module._model.buffers())
    buffers = {t: t.detach().clone() for t in held if t is not None and not t.is_meta}
    try:
        yield
    finally:
        for place, values in before:
            if place.keys() != values.keys() or any(place[key] is not value for key, value in values.items()):
                place.clear()
                place.update(values)
        with torch.no_grad():
            for buffer, value in buffers.items():
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        set_random_states(random)


def valued_copy(module: ThunderModule, values: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A copy of the user's module, attributes and all, with parameters and buffers of the given values."""
    memo: dict[int, Any] = {}
    for name, parameter in module._model.named_parameters():
        memo[id(parameter)] = torch.nn.Parameter(values[name].detach().clone(), parameter.requires_grad)
    for name, buffer in module._model.named_buffers():
        memo[id(buffer)] = values[name].detach().clone()
    made: torch.nn.Module = copy.deepcopy(module._model, memo)
    return made


def eager_outcome(
    plain: torch.nn.Module,
    values: Mapping[str, torch.Tensor],
    args: Any,
    kwargs: Any,
    leaves: Mapping[str, Any],
    inside: AbstractContextManager[Any] | None = None,
) -> Outcome:
    """Call a plain module with parameters of the given values, inside a context if given; gradients are those of
    ``leaves``.
    """
    parameters = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    weights = {name: value for name, value in values.items() if name in parameters}

    def call(*args: Any, **kwargs: Any) -> Any:
        with _ThunderDraws(), inside or contextlib.nullcontext():
            return torch.func.functional_call(plain, weights, args, kwargs)

    found = outcome(call, args, kwargs, leaves)
    found.buffers = {name: buffer.detach() for name, buffer in plain.named_buffers()}
    return found


class _ThunderDraws(TorchFunctionMode):
    """Draws the numbers for dropout as Thunder does, uniform ones, so that equal states give equal masks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return _dropout(*args, **kwargs) if func in _DROPOUTS else func(*args, **kwargs)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> torch.Tensor:
    if not (training and train) or p == 0:
        return input
    if p == 1:
        return torch.zeros_like(input)
    mask = torch.empty_like(input, requires_grad=False).uniform_() < 1 - p
    result = input * mask * (1 / (1 - p))
    return input.copy_(result) if inplace else result
