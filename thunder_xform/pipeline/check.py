"""Each newly compiled entry against eager PyTorch, once, on the arguments of the call that compiles it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from thunder_xform.errors import CheckError
from thunder_xform.parallel.twins import Twins
from thunder_xform.pipeline.compare import Compare
from thunder_xform.pipeline.comparison import FORWARD, Deviation

if TYPE_CHECKING:
    from thunder_xform.pipeline.session import Session

_Call = Callable[..., Any]


class EagerCheck:
    """Runs a model's calls, and compares the first one of each kind with the plain module in eager PyTorch.

    Args:
        session: of the transformed model.
        suspect: finds the plugin to blame for what a comparison found.
        operator: finds the first operator whose result departs.
    """

    def __init__(
        self,
        session: Session,
        suspect: Callable[[Session, Compare], str],
        operator: Callable[[Session, Compare], str],
    ) -> None:
        self._session = session
        self._suspect = suspect
        self._operator = operator
        self._ranks = Twins(session.groups)
        self._seen: set[Any] = set()

    def call(self, run: _Call, args: Any, kwargs: Any) -> Any:
        """``run(*args, **kwargs)``, after the check if any rank meets a call of a new kind.

        Raises:
            CheckError: a value departs, on this rank or another.
        """
        session = self._session
        kind = self._kind(args, kwargs)
        if any(self._ranks.gather(kind not in self._seen).values()):
            first = len(session.events)
            report = self._check(run, args, kwargs)
            self._seen.add(kind)
            for event in session.events[first:]:
                event.check = report
        compiled = len(session.events)
        result = run(*args, **kwargs)
        if len(session.events) > compiled:
            # Compiled for a reason that the kind does not show; the next call is checked.
            self._seen.discard(kind)
        return result

    def _kind(self, args: Any, kwargs: Any) -> Any:
        """What new code may be compiled for."""
        leaves, form = tree_flatten((args, kwargs))
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        return self._session.key.read(), modes, tuple(autocast), str(form), tuple(map(_looks, leaves))

    def _check(self, run: _Call, args: Any, kwargs: Any) -> str:
        session = self._session
        compare = Compare(args, kwargs, self._ranks)
        report, deviations = compare.run(session, run)
        if deviations is None:
            warnings.warn(f"A compiled entry was not compared with eager PyTorch: {report}.", stacklevel=6)
            return f"not compared: {report}"
        everywhere = self._ranks.gather(deviations[0] if deviations else None)
        found = [(rank, deviation) for rank, deviation in everywhere.items() if deviation is not None]
        if found:
            # What is wrong in one rank's forward alone is wrong in the averaged gradients of all.
            rank, deviation = min(found, key=lambda each: (each[1].kind not in FORWARD, each[0]))
            where = f" on rank {rank}" if len(everywhere) > 1 else ""
            plugin = self._suspect(session, compare)
            operators = self._ranks.gather(self._operator(session, compare) if deviation.kind in FORWARD else "")
            raise self._error(deviation, where, plugin, operators[rank])
        return report

    def _error(self, deviation: Deviation, where: str, plugin: str, operator: str) -> CheckError:
        first = f", first after {operator}" if operator else ""
        step = next((step for step in self._session.steps if step.name == plugin), None)
        if step is not None:
            blame = f"Without plugin {plugin!r} [{step.distribution}] it does not; leave that out, and report it."
        elif plugin:
            blame = "It does whichever plugin is left out; resolve them one by one."
        else:
            blame = "It does without any plugin, too: report it to Thunder, or change that part of the model."
        return CheckError(
            f"The compiled model departs from eager PyTorch{where}: {deviation}{first}.",
            blame,
            kind=deviation.kind,
            name=deviation.name,
            detail=deviation.detail,
            operator=operator,
            plugin=plugin if step else "",
        )


def _looks(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    return (type(leaf), leaf if isinstance(leaf, bool | int | float | complex | str) else None)
