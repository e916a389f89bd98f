"""The user's grip on a transformed model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from thunder_xform.checkpoint import IncompatibleKeys, Kind, export_state, import_state, sharding
from thunder_xform.errors import PipelineError
from thunder_xform.host.events import CompileEvent
from thunder_xform.host.module import transforms_of
from thunder_xform.host.transformed import session_of
from thunder_xform.host.version import Version
from thunder_xform.pipeline.gradient_norm import gradient_norm
from thunder_xform.pipeline.pipeline import Pipeline
from thunder_xform.pipeline.session import Session
from thunder_xform.pipeline.stage import Stage


class Handle:
    """What can be done with a transformed model besides calling it. Get one with :func:`thunder_xform.handle`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<handle of a model transformed by {' -> '.join(self.pipeline)}>"

    @property
    def pipeline(self) -> tuple[str, ...]:
        """Plugin names in order."""
        return self._session.names

    def plugin(self, name: str) -> Any:
        """The plugin instance of that name."""
        return self._session.hooks.plugin(name)

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The compiled model's parameters by name, tied ones once."""
        return self._session.parameters()

    def version(self, name: str) -> Version:
        """Logical and stored shape, dtype, layout, owner and origin of a parameter or buffer."""
        return self._session.ledger.latest(name)

    @property
    def events(self) -> tuple[CompileEvent, ...]:
        """All compilations so far, with the reason for each."""
        return tuple(self._session.events)

    @property
    def compiled_entries(self) -> int:
        """How many compiled variants the model holds."""
        return sum(len(stats.interpreter_cache) for stats in self._session.statistics)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally in the backward of calls made inside.

        The first backward of a call made outside reduces the sum, once. Entering once around several microbatches and
        entering once per microbatch give the same gradients. ``model.no_sync`` is the same.
        """
        return self._session.no_sync()

    def sync_gradients(self) -> None:
        """Reduce what was accumulated locally, for loops that end inside :meth:`no_sync`. A collective."""
        self._session.hooks.each("sync_gradients")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm, over the whole model on all ranks, is at most ``max_norm``.

        Args:
            max_norm: the largest norm allowed.
            norm_type: order of the norm, ``inf`` for the largest magnitude.

        Returns:
            The norm before scaling, a scalar tensor, the same on all ranks.

        Raises:
            PipelineError: a plugin distributes parameters and says nothing of their norm, or several plugins do.
        """
        parameters = [p for p in self._session.parameters().values() if p.requires_grad or p.grad is not None]
        norm = gradient_norm(self._session, parameters, norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def state_dict(self, kind: Kind = "full") -> dict[str, torch.Tensor]:
        """Tensors of the model by name; on every rank where plugins distribute the model.

        Args:
            kind: ``"full"``: keys, shapes and values of the plain model that computes the same function, tied
                tensors under all their names. ``"adapter"``: only what adapter plugins added. ``"sharded"``:
                every stored tensor as this rank holds it.

        Returns:
            Detached tensors. As in torch, they share storage with the live ones, except what plugins had to
            compute: clone what shall not change.

        Raises:
            CheckpointError: no such kind, no adapters, or no plain model that computes the same.
        """
        return export_state(self._session, kind)

    def load_state_dict(
        self, state: Mapping[str, torch.Tensor], kind: Kind = "full", strict: bool = True
    ) -> IncompatibleKeys:
        """Copy a state of the same kind into the live tensors, converting dtype and device.

        Everything is checked first, on all ranks where plugins distribute the model; nothing is half-loaded.
        A full state replaces the function that the model computes, adapters included. Where the user's module
        shares tensors with the compiled model, it changes too, as it does in training.

        Args:
            state: tensors by name.
            kind: what they are, as in :meth:`state_dict`.
            strict: refuse missing and unexpected keys instead of passing over them.

        Returns:
            The keys passed over.

        Raises:
            CheckpointError: keys, shapes or types do not fit.
            ParallelError: they fit here, but not on another rank.
        """
        return import_state(self._session, state, kind, strict)

    def distributed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor shaped like the stored parameter ``name`` as a DTensor over the ranks that hold its other rows.

        For code that re-shards or gathers parameters, gradients or moments of optimizers. The result shares the storage
        of ``tensor``, and is ``tensor`` itself where every rank holds the whole.

        Raises:
            CheckpointError: ``tensor`` is not shaped like the stored one.
        """
        return sharding.distributed(self._session, name, tensor)

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which ``tensor``, shaped like the stored parameter ``name``, is this rank's part.

        A collective where other ranks hold the rest.
        """
        return sharding.whole(self._session, name, tensor)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a whole ``tensor`` for the parameter ``name``: the reverse of :meth:`whole`.

        Raises:
            CheckpointError: ``tensor`` does not have the shape of the whole parameter.
        """
        return sharding.part(self._session, name, tensor)

    def whole_states(self) -> None:
        """From now on ``model.state_dict()`` gives whole tensors, a collective where parameters are sharded, and
        ``load_state_dict`` takes them, on any number of ranks. For trainers that save what ``state_dict()`` gives.

        Names are the transformed model's own, adapters apart; :meth:`state_dict` gives the plain model's.
        """
        sharding.whole_module_states(self._session)

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer was built from parameters of this model, or of the plain model that it replaces."""
        return self._session.optimizers.knows(optimizer)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer this model's.

        If it was built from the plain model, it trains this one from now on: its parameters give way to those that the
        compiled model trains in their place, and frozen ones go. Its ``state_dict()`` gives whole tensors, which is a
        collective where parameters are sharded, and ``load_state_dict`` takes them, on any number of ranks; parameters
        keep torch's numbers, so that an optimizer of the plain model loads the state.

        Raises:
            PipelineError: it was built from the plain model, and has taken steps already or plugins added parameters
                that it cannot know of.
            CheckpointError: it holds parameters of another model.
        """
        self._session.optimizers.rebind(optimizer)
        sharding.whole_states(self._session, optimizer)

    def invalidate(self, reason: str) -> int:
        """Drop all compiled entries; the next call compiles. Returns how many there were."""
        return self._session.invalidate(reason)

    def explain(self) -> str:
        """The pipeline, the reasons for its order, and what was compiled when and why, as text."""
        session = self._session
        lines = [f"pipeline: {session.resolution.text}"]
        for earlier, later in zip(session.names, session.names[1:], strict=False):
            lines.append(f"  {earlier} before {later}: {session.resolution.why(earlier, later)}")
        for event in session.events:
            seconds = ", ".join(f"{hook} {spent:.3f} s" for hook, spent in event.seconds.items())
            lines.append(f"compilation {event.number}: {'; '.join(event.reasons)}{f' ({seconds})' if seconds else ''}")
            if event.check:
                lines.append(f"  {event.check}")
        return "\n".join(lines)


def handle(model: Any) -> Handle:
    """The handle of a transformed model.

    Args:
        model: what ``thunder.jit(model, transforms=pipeline)`` returned; the pipeline itself, once it transforms a
            model; or a jitted function that contains one transformed model.

    Raises:
        PipelineError: there is no transformed model, or a function contains several.
    """
    sessions = _sessions(model)
    if len(sessions) != 1:
        what = f"contains {len(sessions)} transformed models" if sessions else "is not transformed by a pipeline"
        raise PipelineError(
            f"{type(model).__name__} {what}.",
            "Pass what thunder.jit(model, transforms=registry.resolve([...])) returned.",
        )
    return Handle(sessions[0])


def _sessions(model: Any) -> list[Session]:
    if isinstance(model, Pipeline):
        return [model._session] if model._session.attached else []
    session = session_of(model)
    if session is not None:
        return [session]
    stages = [t for t in transforms_of(model) if isinstance(t, Stage)]
    return list(dict.fromkeys(stage.session for stage in stages if stage.session.attached))
