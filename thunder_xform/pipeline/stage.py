"""One plugin as a Thunder transform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.core.transform_common import Transform

from thunder_xform.errors import PipelineError
from thunder_xform.host import verify
from thunder_xform.host.computation import Computation
from thunder_xform.host.conditions import conditions, is_compiling
from thunder_xform.host.guards import insert_guard
from thunder_xform.host.inputs import InputTable, derive_prologue, read_inputs
from thunder_xform.host.prologue import Prologue
from thunder_xform.host.schedule import Schedule

if TYPE_CHECKING:
    from thunder_xform.pipeline.session import Session


class Stage(Transform):
    """The transform that Thunder sees for one plugin; its hooks run here."""

    def __init__(self, session: Session, index: int) -> None:
        self._session = session
        self._index = index

    def __repr__(self) -> str:
        return f"Stage({self.plugin!r})"

    @property
    def plugin(self) -> Any:
        """The plugin instance behind this transform."""
        return self._session.plugins[self._index]

    def transform_module(self, model: ThunderModule) -> None:
        self._session.attach(self._index, model)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx]:
        session, index = self._session, self._index
        self._require_complete()
        prologue, computation = prologue_trace, computation_trace
        if index == 0:
            session.begin(conditions(prologue))
        with session.compiling():
            if index == 0:
                computation, table = read_inputs(session.ledger, prologue, computation)
                prologue = derive_prologue(insert_guard(prologue, session.key), table, computation, session.ledger)
            else:
                table = session.table
            computation, table = table.advance(computation, index, session.names[index])
            return *self._run_hooks(prologue, computation, table), epilogue_trace

    def _require_complete(self) -> None:
        """Refuse to compile anything but the model that all plugins were applied to."""
        session = self._session
        names = " -> ".join(session.names)
        if 0 < session.attached < len(session.plugins):
            raise PipelineError(
                f"Only {', '.join(session.names[: session.attached])} of the pipeline {names} was applied to the model.",
                "Pass the pipeline to thunder.jit as it is, without reordering or slicing it.",
            )
        if not session.attached or not is_compiling(session.module):
            raise PipelineError(
                f"The pipeline {names} is applied to a function.",
                "Pass it to thunder.jit together with the torch.nn.Module that it shall transform.",
            )

    def _run_hooks(
        self, prologue: TraceCtx, computation: TraceCtx, table: InputTable
    ) -> tuple[TraceCtx, TraceCtx]:
        session, index = self._session, self._index
        before = computation
        prologue = self._call("mutate_prologue", prologue=Prologue(prologue))._trace
        view = self._call("before_autograd", computation=Computation(computation, table))
        computation, session.table = view._trace, view._table
        prologue = derive_prologue(prologue, session.table, computation, session.ledger)
        if session.verify:
            for problem in verify.inconsistencies(prologue, computation, session.table, session.ledger):
                session.fail(index, "before_autograd", problem, before, computation)
            session.check_declared(index, "before_autograd", verify.trace_effects(before, computation), before, computation)
        for trace in (prologue, computation):
            trace.set_provenance(TraceProvenance(f"thunder_xform plugin {session.names[index]}"))
        return prologue, computation

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        with self._session.compiling():
            edited: Schedule = self._call("after_optimization", schedule=Schedule(computation_trace))
            return edited._trace

    def _call(self, hook: str, **view: Any) -> Any:
        """What the plugin's ``hook`` makes of its one argument, a view; the same if it returns None."""
        (given,) = view.values()
        returned = self._session.call(self._index, hook, **view)
        if returned is None:
            return given
        if type(returned) is not type(given):
            kinds = type(returned).__name__, type(given).__name__
            self._session.fail(self._index, hook, f"it returned a {kinds[0]} where a {kinds[1]} is expected")
        return returned
