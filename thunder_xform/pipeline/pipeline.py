"""The pipeline: a list of Thunder transforms made from a resolution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from thunder_xform.errors import LoadError, PipelineError
from thunder_xform.host.module import add_transforms, apply
from thunder_xform.host.transformed import session_of
from thunder_xform.host.types import PluginPolicy
from thunder_xform.implementations import faults
from thunder_xform.pipeline.check import EagerCheck
from thunder_xform.pipeline.session import Session
from thunder_xform.pipeline.stage import Stage
from thunder_xform.pipeline.suspects import find_operator, find_suspect

if TYPE_CHECKING:
    import torch

    from thunder_xform.registry.lock import Lock
    from thunder_xform.registry.resolution import Resolution
    from thunder_xform.registry.step import Step


class Pipeline(list[Any]):
    """An ordered list of Thunder transforms, one per plugin, for one model.

    Pass it to ``thunder.jit(model, transforms=pipeline)``; adding Thunder's own transforms with ``+`` works.

    Attributes:
        resolution: names, order, reasons and lock.
    """

    def __init__(self, stages: Iterable[Stage], session: Session) -> None:
        super().__init__(stages)
        self._session = session
        session.stages = tuple(self)
        self.resolution: Resolution = session.resolution

    def __repr__(self) -> str:
        return f"Pipeline({self.resolution.text!r})"

    @property
    def names(self) -> tuple[str, ...]:
        """Plugin names in order."""
        return self._session.names

    @property
    def lock(self) -> Lock:
        """Names, versions, content hashes and options; compared between ranks and stored in checkpoints."""
        return self.resolution.lock

    def plugin(self, name: str) -> Any:
        """The plugin instance of that name."""
        return self._session.hooks.plugin(name)

    @property
    def model(self) -> Any:
        """The transformed model: what ``thunder.jit`` returned, or what :meth:`bind` made. None before."""
        return self._session.module if self._session.attached else None

    def bind(self, model: torch.nn.Module) -> Pipeline:
        """Transform ``model`` now, for a jitted function that will contain it; returns this pipeline.

        Build optimizers from ``pipeline.model.parameters()``, then call
        ``thunder.jit(step, transforms=pipeline)``; concatenate with ``+`` where a function contains several models.
        """
        apply(model, self)
        return self

    def apply(self, jitted: Any) -> Any:
        """Transform a model that ``thunder.jit`` compiled already, called or not; its compiled entries are dropped.

        Returns:
            ``jitted``.

        Raises:
            PipelineError: it is no jitted model, or a pipeline transforms it already.
        """
        session = session_of(jitted)
        if session is not None:
            raise PipelineError(
                f"The model is transformed by {' -> '.join(session.names)} already.",
                "Resolve all plugins together: registry.resolve([...]).",
            )
        add_transforms(jitted, self)
        return jitted

    # -- thunder.compile(model, plugins=[pipeline]): a pipeline is one of Thunder's own plugins ------------------------

    #: a recipe's transforms come first: some rewrite prologues, and the guards go on top of what they leave
    policy = PluginPolicy.POST

    def setup_transforms(self) -> list[Any]:
        """The transforms, for a recipe."""
        return list(self)

    def setup_lookasides(self) -> None:
        """None, for a recipe."""

    def setup_executors(self) -> None:
        """None, for a recipe: operators carry their implementations."""

    def check(self, against: Literal["eager"] = "eager") -> Pipeline:
        """Compare each newly compiled entry, once, with the plain module in eager PyTorch; returns this pipeline.

        Before the first call of each kind (shapes, dtypes, modes), outputs, buffers and gradients of a trial on copies
        of its arguments are compared with those of the plain model that computes the same (gathered, dequantized,
        merged), under the same random numbers. Nothing that the model or its user holds changes. Takes as much memory
        as a second model; each check compiles no more than the call would. On ranks it is a collective.

        Raises:
            CheckError: at the call, on all ranks: what departs first, and the plugin to blame.
        """
        if against != "eager":
            raise PipelineError(f"There is no check against {against!r}.", "Use check='eager'.")
        if self._session.attached:
            raise PipelineError(
                "The pipeline transforms a model already, which is to be checked from its first call on.",
                "Resolve it with check='eager'.",
            )
        self._session.checking = partial(EagerCheck, suspect=find_suspect, operator=find_operator)
        return self

    def observe(self, *observers: object) -> Pipeline:
        """Register observers: objects whose ``@hookimpl(wrapper=True)`` methods surround every plugin's hooks."""
        for observer in observers:
            self._session.hooks.observe(observer)
        return self


def build(
    resolution: Resolution,
    members: Sequence[tuple[Step, Any]],
    *,
    verify: bool = True,
    check: Literal["eager"] | None = None,
) -> Pipeline:
    """Make the pipeline for a resolution.

    Args:
        resolution: what was resolved.
        members: its steps that have code, each with its plugin instance, in order.
        verify: check traces and declared effects after every plugin (cheap next to tracing).
        check: ``"eager"`` as in :meth:`Pipeline.check`.

    Raises:
        LoadError: a plugin's class has hooks that would never run.
    """
    for step, plugin in members:
        _refuse_dead_hooks(step, type(plugin))
    session = Session(resolution, members, verify)
    pipeline = Pipeline([Stage(session, index) for index in range(len(members))], session)
    return pipeline if check is None else pipeline.check(check)


def _refuse_dead_hooks(step: Step, cls: type) -> None:
    for problem, remedy in faults(cls):
        raise LoadError(
            f"{step.name!r} [{step.origin}]: its class {cls.__name__} {problem}.",
            remedy,
            plugin=step.name,
            distribution=step.distribution,
            version=step.version,
            entry_point=step.entry_point,
            target=step.manifest.plugin or f"{cls.__module__}:{cls.__qualname__}",
        )
