"""The plain model that computes the same, as a function of the tensors that train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from thunder_xform.checkpoint.state import State, exported, plain_state, stores_otherwise

if TYPE_CHECKING:
    from thunder_xform.context import Session


def differentiable_state(session: Session) -> tuple[State, State]:
    """The full state, and the whole tensors that train, by name, of which it is a differentiable function.

    Once shards are gathered and packed weights decoded, what trains becomes a leaf; what the other plugins make of
    those, merged adapters say, has them in its graph. A collective as every export.

    Raises:
        CheckpointError: no plain model computes the same.
    """
    leaves: State = {}

    def before(index: int | None, state: State) -> State:
        if leaves or (index is not None and stores_otherwise(session, index)):
            return state
        for name, tensor in state.items():
            if name in session.ledger and session.ledger.latest(name).requires_grad:
                leaves[name] = tensor.detach().requires_grad_()
        return {**state, **leaves}

    with torch.enable_grad():
        state = exported(session, "full", before)
        return plain_state(session, before(None, state)), leaves
