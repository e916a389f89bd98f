"""Which of a model's adapters take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import thunder_xform as tx


class Selection:
    """The active adapters with their weights. What is compiled depends on :attr:`key`.

    Args:
        adapters: by the names of all adapters, options because of which no other may be active at the same time, or
            an empty text; the first one is active.
    """

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self._adapters = tuple(adapters)
        self._exclusive = dict(adapters)
        self._chosen = {self._adapters[0]: 1.0}
        self._enabled = True
        self.merged = False

    @property
    def active(self) -> Mapping[str, float]:
        """Weights of the active adapters by name; none while disabled."""
        return dict(self._chosen) if self._enabled else {}

    @property
    def key(self) -> tuple[object, ...]:
        """A value that changes with the selection, for a guard key."""
        return (self.merged, *self._chosen.items()) if self._enabled else (False,)

    def choose(self, adapters: str | Sequence[str] | Mapping[str, float]) -> None:
        """Make adapters active, and enable them.

        Raises:
            PipelineError: an unknown name, a weight that is no number, several where only one can be, or weights
                of the model that hold the adapters merged.
        """
        names = [adapters] if isinstance(adapters, str) else adapters
        weights = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 1.0)
        for name, weight in weights.items():
            self.check(name)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or weight - weight != 0:
                raise tx.errors.PipelineError(
                    f"The weight of the adapter {name!r} is {weight!r}.", "Give a finite number."
                )
        if not weights:
            raise tx.errors.PipelineError("No adapter is named.", "Name one, or call disable().")
        if len(weights) > 1 and (reasons := [self._exclusive[name] for name in weights if self._exclusive[name]]):
            raise tx.errors.PipelineError(
                f"Only one adapter can be active at a time under {reasons[0]}.", "Choose one."
            )
        self._check_separate()
        self._chosen = {name: float(weights[name]) for name in self._adapters if name in weights}
        self._enabled = True

    def enable(self, enabled: bool) -> None:
        """Let the active adapters take part, or none.

        Raises:
            PipelineError: they are merged.
        """
        self._check_separate()
        self._enabled = enabled

    def check(self, name: str) -> None:
        """Refuse the name of an adapter that is not there."""
        if name not in self._adapters:
            raise tx.errors.PipelineError(
                f"The model has no adapter {name!r}.",
                f"It has {', '.join(map(repr, self._adapters))}; name all in the option `adapters`.",
                adapter=name,
            )

    def _check_separate(self) -> None:
        if self.merged:
            raise tx.errors.PipelineError("The adapters are merged into the model's weights.", "Call unmerge() first.")
