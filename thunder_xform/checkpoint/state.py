"""Read and write the tensors of a transformed model through the hooks of its plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch

from thunder_xform.checkpoint.names import plain_shapes, stored_names
from thunder_xform.checkpoint.validation import check_keys, check_tensors, fold_aliases
from thunder_xform.errors import CheckpointError, closest, spell
from thunder_xform.parallel.agreement import together

if TYPE_CHECKING:
    from thunder_xform.pipeline.session import Session

Kind = Literal["full", "adapter", "sharded"]
State = dict[str, torch.Tensor]


class IncompatibleKeys(NamedTuple):
    """What a load with ``strict=False`` left out, like the result of ``torch.nn.Module.load_state_dict``."""

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]


def export_state(session: Session, kind: Kind) -> State:
    """The state of the model by name; hooks run in reverse pipeline order.

    Raises:
        CheckpointError: there is no such kind, no adapter, or no plain model that computes the same.
    """
    names = stored_names(session, _known(kind))
    state = {name: session.ledger.tensor(name).detach() for name in names}
    for index in reversed(range(len(session.plugins))):
        state = _mapped(session, index, "export_state", state, kind)
    return _plain(session, state) if kind == "full" else state


def import_state(
    session: Session, state: Mapping[str, Any], kind: Kind, strict: bool = True
) -> IncompatibleKeys:
    """Copy a state into the live tensors; hooks run in pipeline order.

    Nothing is written unless everything fits, on every rank where plugins have process groups (a collective).

    Raises:
        CheckpointError: keys (if ``strict``), shapes or types do not fit.
        ParallelError: they fit here, but not on another rank.
    """
    with together(session.groups, "load_state_dict"):
        names = stored_names(session, _known(kind))
        if kind == "full":
            shapes = plain_shapes(session)
            keys = IncompatibleKeys(*check_keys(shapes, state, strict))
            given = {key: value for key, value in state.items() if key in shapes}
            check_tensors(given, shapes)
            given = fold_aliases(session.ledger, given)
        else:
            keys = IncompatibleKeys(*check_keys(names, state, strict))
            given = {key: value for key, value in state.items() if key in names}
        for index in range(len(session.plugins)):
            given = _mapped(session, index, "import_state", given, kind)
        live = {name: session.ledger.tensor(name) for name in names}
        check_keys(live, given, strict=True, partial=True)
        check_tensors(given, {name: tuple(live[name].shape) for name in given}, live)
    with torch.no_grad():
        for name, value in given.items():
            live[name].copy_(value)
    return keys


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
        mapped = session.call(index, hook, state=state)
    finally:
        context.state_kind = None
    return state if mapped is None else mapped


def _plain(session: Session, state: State) -> State:
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
    check_tensors(plain, shapes)
    return plain
