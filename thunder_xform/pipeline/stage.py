"""One plugin as a Thunder transform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.core.transform_common import Transform

from thunder_xform.errors import PipelineError
from thunder_xform.host import verify
from thunder_xform.host.computation import Computation
from thunder_xform.host.guards import insert_guard
from thunder_xform.host.inputs import InputTable, derive_prologue, read_inputs
from thunder_xform.host.prologue import Prologue
from thunder_xform.host.schedule import Schedule
from thunder_xform.pipeline.events import CompileEvent, reasons

if TYPE_CHECKING:
    from thunder_xform.pipeline.session import Session


class Stage(Transform):
    """The transform that Thunder sees for one plugin; its hooks run here."""

    def __init__(self, session: Session, index: int) -> None:
        self._session = session
        self._index = index
        self._table: InputTable | None = None

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
        if session.attached < len(session.plugins):
            raise PipelineError(
                f"The pipeline {' -> '.join(session.names)} was not applied to a model.",
                "Pass it to thunder.jit together with the torch.nn.Module it shall transform.",
            )
        prologue, computation = prologue_trace, computation_trace
        if index == 0:
            computation, table = self._open(prologue, computation)
            prologue = derive_prologue(insert_guard(prologue, session.key), table, computation, session.ledger)
        else:
            table = session.table
        computation, table = table.advance(computation, index, session.names[index])
        return *self._run_hooks(prologue, computation, table), epilogue_trace

    def _open(self, prologue: TraceCtx, computation: TraceCtx) -> tuple[TraceCtx, InputTable]:
        session = self._session
        key = session.named_key()
        session.events.append(CompileEvent(len(session.events), reasons(key, session.events), key))
        return read_inputs(session.ledger, prologue, computation)

    def _run_hooks(
        self, prologue: TraceCtx, computation: TraceCtx, table: InputTable
    ) -> tuple[TraceCtx, TraceCtx]:
        session, index = self._session, self._index
        before = computation
        if session.implements(index, "mutate_prologue"):
            edited = session.call(index, "mutate_prologue", prologue=Prologue(prologue))
            prologue = prologue if edited is None else edited._trace
        view = Computation(computation, table)
        if session.implements(index, "before_autograd"):
            view = session.call(index, "before_autograd", computation=view) or view
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
        session, index = self._session, self._index
        if not session.implements(index, "after_optimization"):
            return computation_trace
        edited = session.call(index, "after_optimization", schedule=Schedule(computation_trace))
        return computation_trace if edited is None else edited._trace
