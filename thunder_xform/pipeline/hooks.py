"""The plugins of one pipeline: their hooks, and what a plugin is blamed for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pluggy

from thunder_xform import hookspecs
from thunder_xform.errors import PipelineError, VerificationError, XformError
from thunder_xform.host import verify
from thunder_xform.implementations import Implementations, faults, implementations
from thunder_xform.pipeline.instruments import Timing

if TYPE_CHECKING:
    from thunder_xform.context import Context
    from thunder_xform.registry.step import Step


class PluginHooks:
    """Calls the hooks of plugins by their position in the pipeline.

    Args:
        steps: the resolution's, in order.
        plugins: the instance for each.
        contexts: what its hooks are given, for each.
    """

    def __init__(self, steps: Sequence[Step], plugins: Sequence[Any], contexts: Sequence[Context]) -> None:
        self.steps = steps
        self.plugins = plugins
        self.names = tuple(step.name for step in steps)
        self._contexts = contexts
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs.Hooks)
        parts = [implementations(plugin) for plugin in plugins]
        self._own: tuple[Implementations, ...] = tuple(own for own, _ in parts)
        for part in (*self._own, *(wrappers for _, wrappers in parts), Timing()):
            self._manager.register(part)

    def observe(self, observer: object) -> None:
        """Register an observer, an object with ``@hookimpl(wrapper=True)`` methods; it sees every plugin's hooks."""
        for problem, remedy in faults(type(observer), observer=True):
            raise PipelineError(f"The observer {type(observer).__name__} {problem}.", remedy)
        self._manager.register(observer)

    def call(self, index: int, hook: str, **arguments: Any) -> Any:
        """Call one plugin's implementation of ``hook``, inside all wrappers; None if it has none.

        Wrappers are those of observers and those of any plugin.
        """
        if not self.implements(index, hook):
            return None
        others = [own for i, own in enumerate(self._own) if i != index]
        caller = self._manager.subset_hook_caller(hook, others)
        with self.blaming(index, hook):
            return caller(ctx=self._contexts[index], **arguments)

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

    def guard_keys(self) -> dict[str, Callable[[], Hashable]]:
        """A reader for each plugin that has a guard key, in order.

        They run on every call of the model, hence directly and not through pluggy.
        """
        readers = {}
        for implementation in self._manager.hook.guard_key.get_hookimpls():
            if implementation.plugin in self._own:
                index = self._own.index(implementation.plugin)
                wanted = {"ctx": self._contexts[index]} if "ctx" in implementation.argnames else {}
                readers[self.names[index]] = partial(implementation.function, **wanted)
        return {name: readers[name] for name in self.names if name in readers}

    def rewriters(self) -> tuple[str, ...]:
        """Names of the plugins that, by their manifests, may change what the model's operators compute."""
        return tuple(
            step.name
            for index, step in enumerate(self.steps)
            if self.implements(index, "before_autograd")
            and not {"trace", "trace.compute"}.isdisjoint(step.manifest.effects.writes)
        )

    def implemented(self, hook: str) -> bool:
        """Whether any plugin implements ``hook``."""
        return any(self.implements(index, hook) for index in range(len(self.plugins)))

    def implements(self, index: int, hook: str) -> bool:
        """Whether plugin ``index`` implements ``hook``; a wrapper is no implementation."""
        return hasattr(self._own[index], hook)

    @contextlib.contextmanager
    def blaming(self, index: int, hook: str) -> Iterator[None]:
        """Note on whatever error comes out of a plugin's code which plugin and hook it came from."""
        try:
            yield
        except XformError:
            raise
        except Exception as error:
            error.add_note(f"In {hook} of plugin {self.names[index]!r} [{self.steps[index].distribution}].")
            raise

    def check_declared(self, index: int, hook: str, found: dict[str, str], before: Any = "", after: Any = "") -> None:
        """Refuse effects that the manifest of plugin ``index`` does not declare."""
        manifest = self.steps[index].manifest
        for problem in verify.undeclared(found, manifest.effects.writes):
            self.fail(index, hook, problem, before, after)

    def fail(self, index: int, hook: str, problem: str, before: Any = "", after: Any = "") -> None:
        """Blame plugin ``index`` for ``problem``."""
        step = self.steps[index]
        raise VerificationError(step.name, step.distribution, hook, problem, str(before), str(after))
