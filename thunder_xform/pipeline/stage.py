"""One plugin as a Thunder transform."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from thunder_xform.errors import PipelineError
from thunder_xform.host import foreign, functions, memory, verify
from thunder_xform.host.computation import Computation
from thunder_xform.host.conditions import conditions
from thunder_xform.host.derivatives import attend_backward
from thunder_xform.host.guards import insert_guard, with_argument_check, with_check, with_module_checks
from thunder_xform.host.inplace import without_writes
from thunder_xform.host.inputs import InputTable
from thunder_xform.host.module import apply
from thunder_xform.host.prologue import Prologue
from thunder_xform.host.schedule import Schedule
from thunder_xform.host.sparse import refuse_sparse_operators
from thunder_xform.host.stamp import Stamp
from thunder_xform.host.torch_gradients import with_torch_gradients
from thunder_xform.host.types import ThunderModule, TraceCtx, TraceProvenance, Transform
from thunder_xform.host.unpacking import derive_prologue, read_inputs
from thunder_xform.host.writes import repeat_writes

if TYPE_CHECKING:
    from thunder_xform.pipeline.session import Session


class Stage(Transform):
    """The transform that Thunder sees for one plugin; its hooks run here."""

    def __init__(self, session: Session, index: int) -> None:
        #: the transformation that the plugin is part of
        self.session = session
        self._index = index

    def __repr__(self) -> str:
        return f"Stage({self.plugin!r})"

    @property
    def plugin(self) -> Any:
        """The plugin instance behind this transform."""
        return self.session.plugins[self._index]

    def transform_module(self, model: ThunderModule) -> None:
        self.session.attach(self._index, model)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        session, index = self.session, self._index
        prologue, computation = prologue_trace, computation_trace
        if index == 0:
            session.roots = self._find_model(prologue)
            if session.roots != ():
                given = prologue, computation, epilogue_trace
                prologue, computation, epilogue_trace = seen = functions.observe(session, self, given)
                if seen is not given:
                    session.roots = functions.enter(session.module, prologue)
                if refusal := session.watch.refusal():
                    raise refusal
                stamp, read = session.watch.stamp()
                session.begin(read | conditions(prologue))
            if session.roots and session.check is not None:
                session.unchecked("it was compiled into a function that contains the model")
        if session.roots == ():
            return prologue, computation, epilogue_trace
        with session.compiling():
            if index == 0:
                prologue, computation, table = self._open(prologue, computation, stamp)
                epilogue_trace = repeat_writes(epilogue_trace, computation, session.watch, session.assigned.assign)
            else:
                table = session.table
            computation, table = table.advance(computation, index, session.names[index])
            prologue, computation = self._run_hooks(prologue, computation, table)
            if index == len(session.plugins) - 1:
                named = {proxy.name: name for name, proxy in session.table.inputs.items()}
                epilogue_trace = attend_backward(epilogue_trace, computation, named, session.unreached)
            return prologue, computation, epilogue_trace

    def _find_model(self, prologue: TraceCtx) -> tuple[str, ...] | None:
        """The prologue's proxies for the model: None if it is the model's own, empty if this call does not use it."""
        session = self.session
        names = " -> ".join(session.names)
        if 0 < session.attached < len(session.plugins):
            applied = ", ".join(session.names[: session.attached])
            raise PipelineError(
                f"Only {applied} of the pipeline {names} was applied to the model.",
                "Pass the pipeline to thunder.jit as it is, without reordering or slicing it.",
            )
        if session.attached and functions.compiles(session.module):
            # A module among the arguments is no part of the model, whatever its parameters are called.
            return functions.enter(session.module, prologue) if functions.uses_several_modules(prologue) else None
        if not session.attached:
            models = list(dict.fromkeys(functions.module_roots(prologue).values()))
            if len(models) != 1:
                raise PipelineError(
                    f"The pipeline {names} is applied to a function that uses {len(models)} modules.",
                    "Say which one it transforms: thunder.jit(fn, transforms=pipeline.bind(model)).",
                )
            apply(models[0], session.stages)
        roots = functions.enter(session.module, prologue)
        if not roots and functions.compilation_under_way()[0] not in session.adopters:
            raise PipelineError(
                f"The function does not use the {type(session.module._model).__name__} that {names} transforms.",
                "Call that model in the function, or leave the pipeline out of transforms=.",
            )
        return roots

    def _open(self, prologue: TraceCtx, computation: TraceCtx, stamp: Stamp) -> tuple[TraceCtx, TraceCtx, InputTable]:
        session = self.session
        computation, table = read_inputs(session.ledger, prologue, computation, session.roots)
        prologue = with_check(prologue, "check_attributes", stamp.holds, first=True)
        memory.take_over_marks(computation, table)
        if session.roots is None:
            table.notes.modules = session.modules.take(computation)
        if session.groups:
            refuse_sparse_operators(computation, table.notes)
        computation = without_writes(computation, table)
        prologue = with_argument_check(prologue, session.watch.answers.take())
        prologue = insert_guard(prologue, session.key.read)
        if session.roots is not None:
            prologue = with_module_checks(prologue, session.roots, session.module)
            prologue = with_check(prologue, "check_originals", session.originals.intact, first=True)
        prologue = derive_prologue(prologue, table, computation, session.ledger)
        if session.verify:
            problems = verify.inconsistencies(prologue, computation, table, session.ledger)
            foreign.refuse_inconsistent(self._in_front(), problems)
        return prologue, computation, table

    def _in_front(self) -> list[Any]:
        """Thunder's transforms that come before the pipeline in the compilation under way."""
        transforms = functions.compilation_under_way()[0].transforms
        return list(transforms[: transforms.index(self)]) if self in transforms else []

    def _run_hooks(self, prologue: TraceCtx, computation: TraceCtx, table: InputTable) -> tuple[TraceCtx, TraceCtx]:
        session, index = self.session, self._index
        before = computation
        prologue = self._call("mutate_prologue", prologue=Prologue(prologue, session.roots))._trace
        view = self._call("before_autograd", computation=Computation(computation, table))
        computation, session.table = view._trace, view._table
        prologue = derive_prologue(prologue, session.table, computation, session.ledger)
        if session.verify:
            for problem in verify.inconsistencies(prologue, computation, session.table, session.ledger):
                session.hooks.fail(index, "before_autograd", problem, before, computation)
            found = verify.trace_effects(before, computation, session.table.notes)
            session.hooks.check_declared(index, "before_autograd", found, before, computation)
        if index == len(session.plugins) - 1:
            view = with_torch_gradients(Computation(computation, session.table))
            computation, session.table = view._trace, view._table
            computation = memory.marked(computation, session.table)
        for trace in (prologue, computation):
            trace.set_provenance(TraceProvenance(f"thunder_xform plugin {session.names[index]}"))
        return prologue, computation

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        if self.session.roots == ():
            return computation_trace
        with self.session.compiling():
            edited: Schedule = self._call("after_optimization", schedule=Schedule(computation_trace))
            return edited._trace

    def _call(self, hook: str, **view: Any) -> Any:
        """What the plugin's ``hook`` makes of its one argument, a view; the same if it returns None."""
        (given,) = view.values()
        with self.session.untouched(self._index, hook) if self.session.verify else contextlib.nullcontext():
            returned = self.session.hooks.call(self._index, hook, **view)
        if returned is None:
            return given
        if type(returned) is not type(given):
            kinds = type(returned).__name__, type(given).__name__
            self.session.hooks.fail(self._index, hook, f"it returned a {kinds[0]} where a {kinds[1]} is expected")
        return returned
