"""The transformation of one model: ledger, guard key, and the hooks of all plugins in order."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pluggy
import torch

from thunder_xform import hookspecs
from thunder_xform.errors import PipelineError, VerificationError, XformError
from thunder_xform.host import transformed, verify
from thunder_xform.host.functions import compilation_under_way
from thunder_xform.host.guards import training_modes
from thunder_xform.host.inputs import InputTable
from thunder_xform.host.ledger import Ledger, Version
from thunder_xform.host.module import drop_entries, statistics_of
from thunder_xform.host.optimizers import OptimizerCheck
from thunder_xform.host.parameters import Parameters
from thunder_xform.host.types import ThunderModule
from thunder_xform.parallel.agreement import agree_on, refuse_overlaps, together
from thunder_xform.pipeline.context import Context
from thunder_xform.pipeline.events import CompileEvent, reasons
from thunder_xform.pipeline.instruments import Timing

if TYPE_CHECKING:
    from thunder_xform.registry import Resolution, Step


class Session:
    """Everything that belongs to the one model that a pipeline transforms."""

    #: the transformed model and its ledger, from the first plugin on
    module: ThunderModule
    ledger: Ledger
    #: optimizers built from the plain model
    optimizers: OptimizerCheck
    #: inputs of the trace under transformation, as the latest plugin left them
    table: InputTable
    #: proxies that stand for the model in the prologue under transformation; None if it is the model's own
    roots: tuple[str, ...] | None = None

    def __init__(self, resolution: Resolution, members: Sequence[tuple[Step, Any]], verify: bool) -> None:
        self.resolution = resolution
        self.plugins = tuple(plugin for _, plugin in members)
        self.steps = tuple(step for step, _ in members)
        self.names = tuple(step.name for step in self.steps)
        self.contexts = tuple(Context(self, s.name, s.distribution, i) for i, s in enumerate(self.steps))
        self.verify = verify
        self.no_sync_depth = 0
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
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs.Hooks)
        for name, plugin in zip(self.names, self.plugins, strict=True):
            self._manager.register(plugin, name=f"plugin {name}")
        self._manager.check_pending()
        self._manager.register(Timing())
        self._keys: tuple[tuple[str, Callable[[], Hashable]], ...] = ()

    # -- hooks ---------------------------------------------------------------------------------------------------

    def observe(self, observer: object) -> None:
        """Register an observer, an object with ``@hookimpl(wrapper=True)`` methods; it sees every plugin's hooks."""
        self._manager.register(observer)

    def call(self, index: int, hook: str, **arguments: Any) -> Any:
        """Call one plugin's implementation of ``hook``, inside the observers' wrappers; None if it has none."""
        if not self.implements(index, hook):
            return None
        others = [p for i, p in enumerate(self.plugins) if i != index]
        caller = self._manager.subset_hook_caller(hook, others)
        with self._blaming(index, hook):
            return caller(ctx=self.contexts[index], **arguments)

    @contextlib.contextmanager
    def _blaming(self, index: int, hook: str) -> Iterator[None]:
        """Note on whatever error comes out of a plugin's code which plugin and hook it came from."""
        try:
            yield
        except XformError:
            raise
        except Exception as error:
            error.add_note(f"In {hook} of plugin {self.names[index]!r} [{self.steps[index].distribution}].")
            raise

    def each(self, hook: str, **arguments: Any) -> None:
        """Call ``hook`` of every plugin in order."""
        for index in range(len(self.plugins)):
            self.call(index, hook, **arguments)

    def plugin(self, name: str) -> Any:
        """The plugin instance of that name."""
        if name not in self.names:
            raise PipelineError(
                f"The pipeline {' -> '.join(self.names)} has no plugin {name!r}.", "Use one of its names."
            )
        return self.plugins[self.names.index(name)]

    def implements(self, index: int, hook: str) -> bool:
        """Whether the plugin at ``index`` implements ``hook``."""
        plugin = self.plugins[index]
        return any(i.plugin is plugin for i in getattr(self._manager.hook, hook).get_hookimpls())

    # -- thunder.jit ---------------------------------------------------------------------------------------------

    def attach(self, index: int, module: ThunderModule) -> None:
        """Let plugin ``index`` transform the model's state. The first call opens the ledger, the last one seals it."""
        if index == 0:
            if self.attached:
                raise PipelineError(
                    f"This pipeline ({' -> '.join(self.names)}) transforms a model already.",
                    "Call registry.resolve(...) again for another model; a pipeline serves one.",
                )
            self.module = module
            self.ledger = Ledger(module)
            self._join()
        if index != self.attached or module is not self.module:
            raise PipelineError(
                f"Plugin {self.names[index]!r} was applied out of order; the pipeline is {' -> '.join(self.names)}.",
                "Pass the pipeline to thunder.jit as it is, without reordering or slicing it.",
            )
        before = self._snapshot()
        with together(self.groups, f"update_model_state of plugin {self.names[index]!r}"):
            self.call(index, "update_model_state", params=Parameters(self.ledger, index, self.names[index]))
            self.check_declared(index, "update_model_state", verify.state_effects(before, self._snapshot()))
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
        modes = training_modes(self.module._model)
        keys: list[tuple[str, Callable[[], Hashable]]] = [("training", modes)]
        for implementation in self._manager.hook.guard_key.get_hookimpls():
            if implementation.plugin in self.plugins:
                # Called on every call of the model, hence directly and not through pluggy.
                index = self.plugins.index(implementation.plugin)
                wanted = {"ctx": self.contexts[index]} if "ctx" in implementation.argnames else {}
                keys.append((self.names[index], partial(implementation.function, **wanted)))
        self._keys = tuple(sorted(keys[1:], key=lambda k: self.names.index(k[0])) + keys[:1])
        self.optimizers = OptimizerCheck(self.ledger, self.parameters)
        if self.ledger.release_requested:
            self.ledger.release_originals()
        self.statistics.add(statistics_of(self.module))
        transformed.attach(self.module, self)

    def _snapshot(self) -> dict[str, tuple[Version, int]]:
        return {name: (self.ledger.latest(name), self.ledger.tensor(name).data_ptr()) for name in self.ledger}

    def check_declared(self, index: int, hook: str, found: dict[str, str], before: Any = "", after: Any = "") -> None:
        """Refuse effects that the manifest of plugin ``index`` does not declare."""
        manifest = self.steps[index].manifest
        for problem in verify.undeclared(found, manifest.effects.writes):
            self.fail(index, hook, problem, before, after)

    def fail(self, index: int, hook: str, problem: str, before: Any = "", after: Any = "") -> None:
        """Blame plugin ``index`` for ``problem``."""
        step = self.steps[index]
        raise VerificationError(step.name, step.distribution, hook, problem, str(before), str(after))

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
        key = self.named_key()
        self._check_key(key)
        held = self.events[self._dropped_before :]
        why = reasons(key, conditions, held, self._why_dropped)
        self.events.append(CompileEvent(len(self.events), why, key, conditions))
        self.statistics.add(compilation_under_way()[1])

    def _check_key(self, key: dict[str, Hashable]) -> None:
        again = self.named_key()
        for index, name in enumerate(self.names):
            value = key.get(name)
            try:
                hash(value)
                stable = bool((value,) == (again.get(name),))
            except Exception as error:
                self.fail(index, "guard_key", f"the key {value!r} cannot be hashed and compared ({error})")
            if not stable:
                self.fail(
                    index, "guard_key", f"the key changed from {value!r} to {again[name]!r} while nothing else did"
                )

    # -- state that guards compiled entries ----------------------------------------------------------------------

    def key(self) -> tuple[Hashable, ...]:
        """The value that compiled entries are valid for, now."""
        return tuple([read() for _, read in self._keys])

    def named_key(self) -> dict[str, Hashable]:
        """:meth:`key` with the names of those who contribute to it."""
        key: dict[str, Hashable] = {}
        for name, read in self._keys:
            with self._blaming(self.names.index(name), "guard_key") if name in self.names else contextlib.nullcontext():
                key[name] = read()
        return key

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
        self.each("invalidate_cache", event=event)
        self._dropped_before, self._why_dropped = len(self.events), f"invalidated: {event}"
        return drop_entries(self.statistics)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Live parameters by name, tied ones once."""
        return {
            name: tensor for name in self.ledger if isinstance(tensor := self.ledger.tensor(name), torch.nn.Parameter)
        }

    def gradient_norm(self, parameters: list[torch.nn.Parameter], norm_type: float) -> torch.Tensor:
        """Norm of the whole gradient of ``parameters``: from the plugin that distributes them, else plainly."""
        for index in reversed(range(len(self.plugins))):
            norm = self.call(index, "gradient_norm", parameters=parameters, norm_type=norm_type)
            if norm is not None:
                return norm
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
