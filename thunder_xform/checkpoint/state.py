"""Read and write the tensors of a transformed model through the hooks of its plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch

from thunder_xform.checkpoint import sharding
from thunder_xform.checkpoint.names import plain_dtypes, plain_shapes, stored_names
from thunder_xform.checkpoint.validation import (
    check_keys,
    check_numbers,
    check_shapes,
    check_values,
    check_writable,
    fold_aliases,
)
from thunder_xform.errors import CheckpointError, closest, spell
from thunder_xform.parallel.agreement import together

if TYPE_CHECKING:
    from thunder_xform.context import Session

Kind = Literal["full", "adapter", "sharded"]
State = dict[str, torch.Tensor]


class IncompatibleKeys(NamedTuple):
    """What a load with ``strict=False`` left out, like the result of ``torch.nn.Module.load_state_dict``."""

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]


def export_state(session: Session, kind: Kind) -> State:
    """The state of the model by name; hooks run in the reverse of the order in which an import passes them.

    Raises:
        CheckpointError: there is no such kind, no adapter, or no plain model that computes the same.
    """
    state = exported(session, kind)
    if kind == "full":
        return plain_state(session, state)
    if kind == "sharded":
        return {name: sharding.distributed(session, name, tensor) for name, tensor in state.items()}
    return state


def exported(session: Session, kind: Kind, before: Callable[[int, State], State] = lambda index, state: state) -> State:
    """What the plugins' hooks make of the stored tensors; ``before`` edits the state ahead of each plugin's."""
    names = stored_names(session, _known(kind))
    state = {name: session.ledger.tensor(name).detach() for name in names}
    for index in reversed(_order(session)):
        state = _mapped(session, index, "export_state", before(index, state), kind)
    return state


def import_state(session: Session, state: Mapping[str, Any], kind: Kind, strict: bool = True) -> IncompatibleKeys:
    """Copy a state into the live tensors; hooks run in pipeline order, those of plugins that change the layout last.

    Nothing is written unless everything fits, on every rank where plugins have process groups (a collective).

    Raises:
        CheckpointError: keys (if ``strict``), shapes or types do not fit.
        ParallelError: they fit here, but not on another rank.
    """
    with together(session.groups, "load_state_dict"):
        names = stored_names(session, _known(kind))
        shapes = plain_shapes(session) if kind == "full" else {}
        expected = shapes if kind == "full" else names
        keys = IncompatibleKeys(*check_keys(expected, state, strict))
        given = {key: value for key, value in state.items() if key in expected}
        check_values(given, distributed=kind == "sharded")
        if kind == "full":
            check_shapes(given, shapes)
            check_numbers(given, plain_dtypes(session, given))
            given = fold_aliases(session.ledger, given)
        else:
            check_shapes(given, sharding.expected_shapes(session, given, kind))
        if kind == "sharded":
            given = {name: sharding.local(session, name, value) for name, value in given.items()}
            check_values(given)
        for index in _order(session):
            given = _mapped(session, index, "import_state", given, kind)
        live = {name: session.ledger.tensor(name) for name in names}
        check_keys(live, given, strict=True, partial=True)
        check_shapes(given, {name: tuple(tensor.shape) for name, tensor in live.items()})
        check_numbers(given, {name: tensor.dtype for name, tensor in live.items()})
        check_writable({name: live[name] for name in given})
    with torch.no_grad():
        for name, value in given.items():
            live[name].copy_(value)
    return keys


def _order(session: Session) -> list[int]:
    """Plugins in the order in which an import passes them: in pipeline order, but those that change how tensors are
    stored after all others. On the way out, an adapter meets a weight that is gathered and dequantized.
    """
    return sorted(range(len(session.plugins)), key=lambda index: stores_otherwise(session, index))


def stores_otherwise(session: Session, index: int) -> bool:
    """Whether a plugin changes how tensors are stored."""
    return any(effect in ("params", "params.layout") for effect in session.steps[index].manifest.effects.writes)


def _known(kind: str) -> Kind:
    if kind not in get_args(Kind):
        raise CheckpointError(
            f"There is no state of kind {kind!r}.{closest(str(kind), get_args(Kind))}",
            f"Use {spell(map(repr, get_args(Kind)), 'or')}.",
            kind=kind,
        )
    return kind  # type: ignore[return-value]


def _mapped(session: Session, index: int, hook: str, state: State, kind: Kind) -> State:
    context = session.contexts[index]
    context.state_kind = kind
    try:
        mapped = session.hooks.call(index, hook, state=state)
    finally:
        context.state_kind = None
    return state if mapped is None else mapped


def plain_state(session: Session, state: State) -> State:
    """The state under all keys of the plain model, in its order."""
    ledger = session.ledger
    shapes = plain_shapes(session)
    if extra := sorted(set(state) - {ledger.canonical(key) for key in shapes}):
        raise CheckpointError(
            f"{extra[0]!r}, added by {ledger.latest(extra[0]).origin!r}, is no part of the plain model.",
            "Let that plugin's export_state map it away, or save kind='sharded'.",
        )
    plain = {key: state[name] for key in shapes if (name := ledger.canonical(key)) in state}
    check_keys(shapes, plain, strict=True)
    check_shapes(plain, shapes)
    return plain
