"""The transformation of one model, from thunder.jit on."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from thunder_xform.context import Context
from thunder_xform.errors import PipelineError
from thunder_xform.host import foreign, transformed, verify
from thunder_xform.host.assigned import AssignedBuffers
from thunder_xform.host.dtensors import refuse_distributed
from thunder_xform.host.events import CompileEvent, reasons
from thunder_xform.host.functions import already_compiled, compilation_under_way
from thunder_xform.host.inputs import InputTable
from thunder_xform.host.ledger import Ledger
from thunder_xform.host.module import compile_data_of, drop_entries, refuse_caching, statistics_of
from thunder_xform.host.modules import ModuleRecord
from thunder_xform.host.mutations import Watch
from thunder_xform.host.optimizers import OptimizerCheck
from thunder_xform.host.originals import Originals
from thunder_xform.host.parameters import Parameters
from thunder_xform.host.parts import Parts
from thunder_xform.host.sparse import refuse_sparse_gradients
from thunder_xform.host.types import ThunderModule
from thunder_xform.host.untouched import UserModule, fingerprint
from thunder_xform.parallel.agreement import agree_on, refuse_overlaps, together
from thunder_xform.parallel.placements import distributed_parameters
from thunder_xform.pipeline.guard_key import GuardKey
from thunder_xform.pipeline.hooks import PluginHooks

if TYPE_CHECKING:
    from thunder_xform.registry.resolution import Resolution
    from thunder_xform.registry.step import Step


class Session:
    """Everything that belongs to the one model that a pipeline transforms."""

    #: the transformed model and its ledger, from the first plugin on
    module: ThunderModule
    ledger: Ledger
    #: what compiled entries are valid for, once all plugins were applied
    key: GuardKey
    #: optimizers built from the plain model
    optimizers: OptimizerCheck
    #: what traced code changes of the model's state
    watch: Watch
    #: the user's module as it was then
    originals: Originals
    #: parts of the user's module with the tensors that the compiled model holds
    parts: Parts
    #: buffers that a forward assigned
    assigned: AssignedBuffers
    #: which module wrote which operator of the model's latest trace
    modules: ModuleRecord
    #: inputs of the trace under transformation, as the latest plugin left them
    table: InputTable
    #: proxies that stand for the model in the prologue under transformation; None if it is the model's own
    roots: tuple[str, ...] | None = None

    def __init__(
        self,
        resolution: Resolution,
        members: Sequence[tuple[Step, Any]],
        verify: bool,
        checking: Callable[[Session], Any] | None = None,
    ) -> None:
        self.resolution = resolution
        self.plugins = tuple(plugin for _, plugin in members)
        self.steps = tuple(step for step, _ in members)
        self.contexts = tuple(Context(self, s.name, s.distribution, i) for i, s in enumerate(self.steps))
        self.hooks = PluginHooks(self.steps, self.plugins, self.contexts)
        self.names = self.hooks.names
        self.verify = verify
        #: makes `check`, which runs the model's calls; None to run them as they are
        self.checking = checking
        self.check: Any = None
        self.no_sync_depth = 0
        #: parameters without a gradient in the backward under way, on this rank
        self.unreached: set[str] = set()
        #: whether the model's own `state_dict()` gives whole tensors
        self.whole_states = False
        self.events: list[CompileEvent] = []
        self.attached = 0
        self.groups: list[Any] = []
        self.stages: Sequence[Any] = ()
        #: compile data of jitted functions in which the model was found inside
        self.adopters: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Thunder's statistics of the model and of all functions compiled with it; they hold the compiled entries
        self.statistics: weakref.WeakSet[Any] = weakref.WeakSet()
        self._dropped_before = 0
        self._why_dropped = "first call"

    # -- thunder.jit ---------------------------------------------------------------------------------------------

    def attach(self, index: int, module: ThunderModule) -> None:
        """Let plugin ``index`` transform the model's state. The first call opens the ledger, the last one seals it."""
        if index == 0:
            if self.attached:
                raise PipelineError(
                    f"This pipeline ({' -> '.join(self.names)}) transforms a model already.",
                    "Call registry.resolve(...) again for another model; a pipeline serves one.",
                )
            if transformed.session_of(module._model) is not None:
                raise already_compiled(module._model)
            refuse_caching(module)
            refuse_distributed(module._model)
            foreign.refuse_converted(module)
            self.module = module
            self.ledger = Ledger(module)
            self._join()
            if self.groups:
                refuse_sparse_gradients(module._model)
        if index != self.attached or module is not self.module:
            raise PipelineError(
                f"Plugin {self.names[index]!r} was applied out of order; the pipeline is {' -> '.join(self.names)}.",
                "Pass the pipeline to thunder.jit as it is, without reordering or slicing it.",
            )
        before = self._snapshot()
        with together(self.groups, f"update_model_state of plugin {self.names[index]!r}"):
            with self.untouched(index, "update_model_state"):
                self.hooks.call(index, "update_model_state", params=Parameters(self.ledger, index, self.names[index]))
            self.hooks.check_declared(index, "update_model_state", verify.state_effects(before, self._snapshot()))
        self.attached += 1
        if self.attached == len(self.plugins):
            self._seal()

    def _join(self) -> None:
        """Find the process groups, and whether their ranks agree on what to do. A collective."""
        found = [(step, g) for step, p in zip(self.steps, self.plugins, strict=True) for g in p.process_groups()]
        self.groups = [group for _, group in found]
        agree_on(self.resolution.lock, self.ledger.describe(), self.groups)
        # Twice over the groups: if they are no mesh, not every rank shares one with a rank that finds out by itself.
        with together([*self.groups, *self.groups], "The check of the process groups"):
            for resource in sorted({resource for step, _ in found for resource in step.manifest.exclusive}):
                refuse_overlaps([(step.name, group) for step, group in found if resource in step.manifest.exclusive])

    def _seal(self) -> None:
        self.key = GuardKey(self.hooks, self.module._model)
        self.ledger.distribute(distributed_parameters(self.ledger))
        self.optimizers = OptimizerCheck(self.ledger, self.parameters)
        if self.ledger.release_requested:
            self.ledger.release_originals()
        self.watch = Watch(self.module._model, self.ledger)
        self.watch.install(compile_data_of(self.module))
        self.originals = Originals(self.module._model, self.ledger)
        self.parts = Parts(self, self.hooks.rewriters())
        self.assigned = AssignedBuffers(self.module._model, self.ledger, self.invalidate)
        self.statistics.add(statistics_of(self.module))
        self.modules = ModuleRecord(self.module._model)
        self.modules.install(compile_data_of(self.module))
        transformed.attach(self.module, self)
        self.check = self.checking(self) if self.checking else None

    @contextlib.contextmanager
    def untouched(self, index: int, hook: str) -> Iterator[None]:
        """Blame plugin ``index`` if the user's module changes while its ``hook`` runs."""
        if not self.hooks.implements(index, hook):
            yield
            return
        before = UserModule(self.module._model)
        yield
        for change in before.changes():
            self.hooks.fail(index, hook, change)

    def _snapshot(self) -> dict[str, Any]:
        return {name: (self.ledger.latest(name), fingerprint(self.ledger.tensor(name))) for name in self.ledger}

    # -- compilations --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A step of the compilation that is under way; if it fails there was no compilation."""
        try:
            yield
        except BaseException:
            del self.events[-1:]
            raise

    def begin(self, conditions: dict[str, str]) -> None:
        """Record that a compilation starts, and why."""
        key = self.key.named()
        held = self.events[self._dropped_before :]
        why = reasons(key, conditions, held, self._why_dropped)
        self.events.append(CompileEvent(len(self.events), why, key, conditions))
        self.statistics.add(compilation_under_way()[1])

    def unchecked(self, reason: str) -> None:
        """Say that the compilation under way is not compared with eager PyTorch, though that was asked for."""
        self.events[-1].check = f"not compared: {reason}"
        warnings.warn(f"A compiled entry was not compared with eager PyTorch: {reason}.", stacklevel=2)

    # -- while it trains -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the backward of calls made inside."""
        self.no_sync_depth += 1
        try:
            yield
        finally:
            self.no_sync_depth -= 1

    def invalidate(self, event: str) -> int:
        """Drop all compiled entries because of ``event``; returns how many there were."""
        self.hooks.each("invalidate_cache", event=event)
        self._dropped_before, self._why_dropped = len(self.events), f"invalidated: {event}"
        return drop_entries(self.statistics)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Live parameters by name, tied ones once."""
        return {
            name: tensor for name in self.ledger if isinstance(tensor := self.ledger.visible(name), torch.nn.Parameter)
        }
