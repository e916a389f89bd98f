"""Base class of plugins."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Options = TypeVar("Options")


class Plugin(Generic[Options]):
    """A regular transform. Subclass it, implement hooks, and name the class in the manifest's ``plugin`` field.

    One instance serves one pipeline, hence one model.

    Attributes:
        options: the validated instance of the manifest's options class; None where the manifest names none.
    """

    options: Options

    def __init__(self, options: Options = None) -> None:  # type: ignore[assignment]
        self.options = options

    def process_groups(self) -> tuple[Any, ...]:
        """Process groups over which all ranks must run this same pipeline; compared before anything is changed.

        Called at ``thunder.jit``. Raise here if there is no usable group.
        """
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options!r})"
