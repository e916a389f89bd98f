"""One call of a transformed model, compared with the plain module in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from thunder_xform.checkpoint import sharding
from thunder_xform.checkpoint.plain import differentiable_state
from thunder_xform.errors import CheckpointError
from thunder_xform.host.eager import Outcome, eager_outcome, outcome, untouched, valued_copy
from thunder_xform.host.recorder import Log, Recorder, pairs
from thunder_xform.parallel.agreement import together
from thunder_xform.parallel.twins import Twins
from thunder_xform.pipeline.comparison import (
    Deviation,
    backward_deviations,
    coarsest,
    difference,
    forward_deviations,
)

if TYPE_CHECKING:
    from thunder_xform.pipeline.session import Session

_Call = Callable[..., Any]


class Compare:
    """One call, to be compared with eager PyTorch under any session.

    Attributes:
        ranks: all that take part.
        values: state of the plain model, by name, from the latest comparison.
    """

    def __init__(self, args: Any, kwargs: Any, ranks: Twins) -> None:
        self._args, self._kwargs = args, kwargs
        self.ranks = ranks
        self.values: dict[str, torch.Tensor] = {}

    def run(self, session: Session, call: _Call) -> tuple[str, list[Deviation] | None]:
        """What was compared, or why nothing was, and what departs (None for not compared). A collective."""
        reason = ""
        with together(self.ranks.groups, "The check against eager PyTorch"):
            try:
                values, leaves = differentiable_state(session)
            except CheckpointError as error:
                reason = error.problem.rstrip(".")
            else:
                names = [n for n, _ in session.module._model.named_buffers(remove_duplicate=False)]
                self.values = {name: session.ledger.tensor(name) for name in names} | values
                with untouched(session.module):
                    ours = outcome(call, self._args, self._kwargs, session.parameters())
                    ours.buffers = {n: b.detach().clone() for n, b in session.module.named_buffers()}
                plain = valued_copy(session.module, self.values)
                with untouched(session.module):
                    eager = eager_outcome(plain, self.values, self._args, self._kwargs, leaves)
                if not all(map(torch.equal, ours.random, eager.random)):
                    reason = "random numbers are drawn in another number than in eager PyTorch"
        if reason := next(filter(None, self.ranks.gather(reason).values()), ""):
            return reason, None
        return self._compared(session, ours, eager, leaves)

    def first_operator(self, session: Session, call: _Call, log: Log) -> str:
        """The first operator that computes something else, and where; ``call`` writes to ``log``. A collective."""
        plain = valued_copy(session.module, self.values)
        recorder = Recorder(plain)
        with torch.no_grad(), untouched(session.module):
            outcome(call, self._args, self._kwargs, {})
        with torch.no_grad(), untouched(session.module):
            eager_outcome(plain, self.values, self._args, self._kwargs, {}, recorder)
        tolerance = coarsest([*self.values.values(), *(computed.value for computed in recorder.log)])
        for eager, ours in pairs(recorder.log, log.entries):
            if difference(ours.value, eager.value, tolerance):
                return f"{eager.name!r}{eager.place}"
        return ""

    def _compared(
        self, session: Session, ours: Outcome, eager: Outcome, leaves: dict[str, torch.Tensor]
    ) -> tuple[str, list[Deviation]]:
        given = tree_flatten((self._args, self._kwargs))[0]
        tolerance = coarsest([*self.values.values(), *leaves.values(), *eager.outputs, *given])
        found = list(forward_deviations(ours, eager, tolerance))
        local = session.no_sync_depth > 0
        held = local and session.hooks.implemented("discard_gradients")
        wanted: dict[str, torch.Tensor | None] = {}
        for name, leaf in {} if held else leaves.items():
            gradient = eager.gradients[name]
            whole = torch.zeros_like(leaf) if gradient is None else gradient
            mean = whole if local else self.ranks.mean(whole, session.groups)
            wanted[name] = _local(sharding.part(session, name, mean))
        gradients = {name: None if g is None else _local(g) for name, g in ours.gradients.items()}
        found += backward_deviations(gradients, wanted, tolerance, "gradient")
        inputs = [{str(number): g for number, g in enumerate(o.inputs)} for o in (ours, eager)]
        found += backward_deviations(inputs[0], inputs[1], tolerance, "input gradient")
        counts = {
            "outputs": len(eager.outputs),
            "buffers": len(eager.buffers),
            "gradients of inputs": len(inputs[0]),
            "of parameters": "none before a backward that synchronizes" if held else len(wanted),
        }
        told = ", ".join(f"{what}: {count}" for what, count in counts.items())
        return f"equals eager PyTorch within {tolerance:g} ({told})", found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
