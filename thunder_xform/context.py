"""What a hook is told about where it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from thunder_xform.errors import OptionError

if TYPE_CHECKING:
    import torch

    from thunder_xform.host.events import CompileEvent
    from thunder_xform.host.ledger import Ledger
    from thunder_xform.host.version import Version
    from thunder_xform.manifest import Manifest


class Step(Protocol):
    """What is needed of a step of a resolution."""

    @property
    def name(self) -> str: ...
    @property
    def manifest(self) -> Manifest: ...


class Hooks(Protocol):
    """Calls the hooks of plugins by their position in the pipeline."""

    def call(self, index: int, hook: str, **arguments: Any) -> Any:
        """Call one plugin's implementation; None if it has none."""

    def each(self, hook: str, **arguments: Any) -> None:
        """Call every plugin's in order."""


class Session(Protocol):
    """What plugins and checkpoints need of the transformation of one model."""

    module: Any
    ledger: Ledger
    events: list[CompileEvent]
    groups: list[Any]
    no_sync_depth: int
    unreached: set[str]
    whole_states: bool

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def plugins(self) -> tuple[Any, ...]: ...
    @property
    def steps(self) -> Sequence[Step]: ...
    @property
    def contexts(self) -> Sequence[Context]: ...
    @property
    def hooks(self) -> Hooks: ...

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Live parameters by name, tied ones once."""


class Context:
    """Read-only view of one model's transformation, from the position of one plugin.

    Attributes:
        plugin: name of the plugin whose hook runs.
        distribution: distribution it comes from.
        index: its position in the pipeline.
        state_kind: in ``export_state`` and ``import_state``: ``"full"``, ``"sharded"`` or ``"adapter"``; else None.
    """

    def __init__(self, session: Session, plugin: str, distribution: str, index: int) -> None:
        self._session = session
        self.plugin = plugin
        self.distribution = distribution
        self.index = index
        self.state_kind: str | None = None

    @property
    def pipeline(self) -> tuple[str, ...]:
        """Names of all plugins, in order."""
        return self._session.names

    @property
    def module(self) -> torch.nn.Module:
        """The user's module. Read its structure; never change it."""
        module: torch.nn.Module = self._session.module._model
        return module

    @property
    def event(self) -> CompileEvent | None:
        """The compilation under way, or else the latest; None before the first."""
        return self._session.events[-1] if self._session.events else None

    @property
    def no_sync(self) -> bool:
        """Whether gradients are to be accumulated locally in the backward of the call under way."""
        return self._session.no_sync_depth > 0

    @property
    def unreached(self) -> set[str]:
        """Within a backward: parameters on which no output with a gradient depends, so that they get none.

        Their gradients are zeros on this rank. Take a name out if the gradient counts all the same, because another
        rank has one.
        """
        return self._session.unreached

    def tensor(self, name: str) -> torch.Tensor:
        """The live tensor of a parameter or buffer as it is stored on this rank."""
        return self._session.ledger.tensor(name)

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter or buffer as the model's user sees it: a DTensor where plugins distribute it."""
        return self._session.ledger.visible(name)

    def version(self, name: str) -> Version:
        """What the ledger says of a parameter as this plugin left it."""
        version = self._session.ledger.at(name, self.index)
        if version is None:
            raise KeyError(name)
        return version

    def aliases(self, name: str) -> tuple[str, ...]:
        """All names of a tied tensor."""
        return self._session.ledger.aliases(name)

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Live parameters by name, tied ones once."""
        return self._session.parameters()

    def sync_gradients(self) -> None:
        """Reduce what any plugin accumulated locally, in pipeline order. A collective."""
        self._session.hooks.each("sync_gradients")

    def option_error(self, option: str, value: object, problem: str, remedy: str) -> OptionError:
        """An error about the value of one of the plugin's options, to be raised.

        Args:
            option: its name.
            value: its value, or the part of it that is bad.
            problem: one sentence on what is wrong, with the value.
            remedy: one sentence on what to do.
        """
        return OptionError(
            problem, remedy, plugin=self.plugin, distribution=self.distribution, option=option, value=repr(value)
        )

    def plugins(self) -> Mapping[str, Any]:
        """All plugin instances of the pipeline by name."""
        return dict(zip(self._session.names, self._session.plugins, strict=True))
