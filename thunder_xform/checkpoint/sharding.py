"""Stored tensors as parts of whole ones, and optimizer state in whole tensors.

A parameter that plugins cut is a DTensor to its user. What is shaped like it, its gradient or an optimizer's moment, is
cut the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from thunder_xform.errors import CheckpointError
from thunder_xform.parallel.sharded import placed_as

if TYPE_CHECKING:
    from thunder_xform.context import Session


def distributed(session: Session, name: str, local: torch.Tensor) -> torch.Tensor:
    """``local``, shaped like the stored tensor ``name``, as a DTensor over the ranks that hold the other rows.

    It shares the storage of ``local``, and is ``local`` itself where every rank holds the whole or it is a DTensor
    already. A scalar counts as one row: its DTensor has the shape ``(1,)``.

    Raises:
        CheckpointError: ``local`` has another shape.
    """
    like = _like(session, name)
    if like is None or isinstance(local, DTensor):
        return local
    stored = tuple(session.ledger.tensor(name).shape)
    if tuple(local.shape) != stored:
        raise CheckpointError(
            f"{name!r} is stored as {stored}, but the tensor given for it has the shape {tuple(local.shape)}.",
            "Pass the parameter, its gradient, or a tensor made like them.",
            name=name,
        )
    return placed_as(local, like._spec)


def local(session: Session, name: str, value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``value``, a DTensor as :func:`distributed` makes them, or a whole tensor, or that part.

    Raises:
        CheckpointError: a DTensor over other ranks or with another placement.
    """
    like = _like(session, name)
    if not isinstance(value, DTensor):
        is_whole = tuple(value.shape) == _whole_shape(session, name) != tuple(session.ledger.tensor(name).shape)
        return part(session, name, value) if is_whole else value
    if like is not None and _place(value) == _place(like):
        return value.to_local()
    stored = (
        "whole on every rank"
        if like is None
        else f"as {tuple(like.shape)} in {like.placements} over {like.device_mesh}"
    )
    raise CheckpointError(
        f"{name!r} is stored {stored}; given is {tuple(value.shape)} in {value.placements} over {value.device_mesh}.",
        "Let torch.distributed.checkpoint load into handle.state_dict('sharded'): it re-shards.",
        name=name,
    )


def _place(tensor: DTensor) -> tuple[object, ...]:
    return tensor.device_mesh, tensor.placements, tensor.shape


def whole(session: Session, name: str, local: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which ``local`` is this rank's part. A collective where other ranks hold the rest."""
    made = distributed(session, name, local)
    if not isinstance(made, DTensor):
        return local
    full = made.full_tensor()
    # Of an uneven cut it is a view of a padded buffer, which would go along into files.
    full = full if full.nbytes == full.untyped_storage().nbytes() else full.clone()
    return full.reshape(_whole_shape(session, name))


def part(session: Session, name: str, value: torch.Tensor) -> torch.Tensor:
    """The rows of the whole tensor ``value`` that this rank holds of ``name``, on the device of the stored tensor.

    Raises:
        CheckpointError: ``value`` has another shape than the whole tensor.
    """
    like = _like(session, name)
    if like is None:
        return value
    if tuple(value.shape) != _whole_shape(session, name):
        raise CheckpointError(
            f"{name!r} has the shape {_whole_shape(session, name)}, but the tensor given for it {tuple(value.shape)}.",
            "Pass whole tensors, as they are in a full state.",
            name=name,
        )
    value = value.detach().to(session.ledger.tensor(name).device).reshape(like.shape)
    cut = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    local: torch.Tensor = cut.to_local().clone()
    return local


def expected_shapes(session: Session, given: Mapping[str, torch.Tensor], kind: str) -> dict[str, tuple[int, ...]]:
    """The shape that each tensor of a given adapter or sharded state is to have: one of two, whichever fits.

    It comes whole, or in a sharded state as this rank's part; adapters may come as operators see them, too. DTensors,
    which :func:`local` compares with mesh and placements, may have any shape here.
    """
    shapes = {}
    for name, value in given.items():
        version, shape = session.ledger.latest(name), tuple(value.shape)
        good = {version.stored_shape if kind == "sharded" else version.shape, _whole_shape(session, name)}
        shapes[name] = shape if shape in good or isinstance(value, DTensor) else _whole_shape(session, name)
    return shapes


def _like(session: Session, name: str) -> Any:
    """The DTensor that the stored tensor is this rank's part of; None if every rank holds the whole."""
    parameter: Any = session.ledger.distributed(name)
    if parameter is None or not any(placement.is_shard() for placement in parameter.placements):
        return None
    return parameter


def _whole_shape(session: Session, name: str) -> tuple[int, ...]:
    """Shape of the stored tensor before it was cut."""
    return session.ledger.latest(name).whole_shape


# -- optimizers ------------------------------------------------------------------------------------------------------


#: Slots of torch's optimizers that are scalars for every parameter.
_SCALARS = frozenset({"eta", "mu", "mu_product", "step"})


def whole_states(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer.state_dict()`` give whole tensors, a collective where parameters are cut, and
    ``load_state_dict`` take them, in this or another number of ranks.

    Parameters keep torch's numbers: an optimizer of the plain model, built from the same parameters in the same order,
    loads the state.
    """
    parameter_names(session, optimizer)

    def loaded(session: Session, name: str, value: torch.Tensor) -> torch.Tensor:
        own = value.dim() or not _whole_shape(session, name)
        return distributed(session, name, part(session, name, value)) if own else value

    optimizer.register_state_dict_post_hook(lambda optimizer, state: _mapped(session, optimizer, state, whole))
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: _mapped(session, optimizer, state, loaded))


def whole_module_states(session: Session) -> None:
    """Let ``state_dict()`` of the model give whole tensors, a collective where they are cut, and ``load_state_dict``
    take them, in this or another number of ranks. Names are the transformed model's own."""

    def gather(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, _ in module.named_parameters(remove_duplicate=False):
            state[prefix + name] = whole(session, name, state[prefix + name])

    def cut(module: torch.nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        for name, _ in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = distributed(session, name, part(session, name, state[prefix + name]))

    if session.whole_states:
        return
    session.whole_states = True
    session.module.register_state_dict_post_hook(gather)
    session.module.register_load_state_dict_pre_hook(cut)


def _mapped(
    session: Session,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    convert: Callable[[Session, str, torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    names = parameter_names(session, optimizer)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(numbers) != len(names):
        raise CheckpointError(
            f"The state is that of {len(numbers)} parameters, but the optimizer has {len(names)}.",
            "Load the state of an optimizer of the same parameters.",
        )
    by_number = dict(zip(numbers, names, strict=True))
    mapped = {
        number: {
            slot: convert(session, by_number[number], value) if _shaped(slot, value) else value
            for slot, value in slots.items()
        }
        for number, slots in state["state"].items()
    }
    return {**state, "state": mapped}


def _shaped(slot: str, value: Any) -> bool:
    """Whether a slot of an optimizer's state may be shaped like its parameter; counts and the like are not."""
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or slot not in _SCALARS)


def parameter_names(session: Session, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters of ``optimizer``, in the order in which torch numbers them.

    Raises:
        CheckpointError: one is not the model's.
    """
    known = {id(p): name for name, p in session.parameters().items()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in held:
        if id(parameter) not in known:
            raise CheckpointError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not one of "
                f"the {len(known)} of the transformed model.",
                "Build the optimizer from the parameters of one transformed model.",
            )
    return [known[id(parameter)] for parameter in held]
