"""The errors of thunder-xform.

Every error says in its first sentence what is wrong, with the actual names and values, and in its second
what to do about it.  The facts behind the sentences are attributes: no program has to parse a message.
Errors are immutable and picklable: they cross process boundaries when ranks compare notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "CheckError",
    "CheckpointError",
    "ConflictError",
    "CycleError",
    "DeniedError",
    "DiscoveryError",
    "DuplicateClaimError",
    "DuplicateRequestError",
    "HostVersionError",
    "LoadError",
    "ManifestError",
    "MissingRequirementError",
    "OptionError",
    "ParallelError",
    "PipelineError",
    "RequestSyntaxError",
    "ResolutionError",
    "TracingError",
    "UnknownNameError",
    "UnknownOptionError",
    "UnorderedEffectsError",
    "VerificationError",
    "XformError",
]


class XformError(Exception):
    """Base of all errors raised by thunder-xform.

    Attributes:
        problem: what is wrong, one sentence with the actual values.
        remedy: what to do about it, one sentence; empty where nothing sensible can be said.

    Further keyword arguments become read-only attributes.
    """

    problem: str
    remedy: str

    def __init__(self, problem: str, remedy: str = "", **fields: Any) -> None:
        super().__init__(problem, remedy)
        self.__dict__.update(fields, problem=problem, remedy=remedy)

    def __str__(self) -> str:
        return printable(f"{self.problem} {self.remedy}".rstrip(), keep="\n\t")

    def __setattr__(self, name: str, value: object) -> None:
        # The interpreter and contextlib set __traceback__, __cause__, __notes__, ...
        if not (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__}.{name} is read-only")
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))

    @property
    def fields(self) -> Mapping[str, Any]:
        """The structured facts of the error, for ``--json`` and for logs."""
        return {k: v for k, v in self.__dict__.items() if not k.startswith("__")}


def _rebuild(cls: type[XformError], args: tuple[Any, ...], state: dict[str, Any]) -> XformError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


def printable(text: str, *, keep: str = "") -> str:
    """The text with an escape in place of each character that a terminal may obey instead of showing it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def closest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest of `known`, or an empty string."""
    import difflib

    match = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""


def spell(items: Iterable[str], word: str = "and") -> str:
    """``"a, b and c"``."""
    *head, last = items
    return f"{', '.join(head)} {word} {last}" if head else last


class ManifestError(XformError):
    """A manifest does not follow the format.

    Attributes: ``file``, ``field`` (empty where the file as a whole is bad), ``distribution``.
    """

    file: str
    field: str
    distribution: str

    def __init__(self, problem: str, remedy: str, *, file: str, field: str = "", distribution: str = "") -> None:
        where = f"{file} of {distribution}" if distribution else file
        # Keys of a table are anything at all.
        problem, field = printable(problem), printable(field)
        super().__init__(f"{where}: {problem}", remedy, file=file, field=field, distribution=distribution)


class DiscoveryError(XformError):
    """An installed distribution announces a plugin that cannot be found or read.

    Attributes: ``distribution``, ``version``, ``entry_point``.
    """

    distribution: str
    version: str
    entry_point: str

    def __init__(
        self, problem: str, remedy: str = "", *, distribution: str, version: str, entry_point: str = ""
    ) -> None:
        super().__init__(
            printable(problem), printable(remedy), distribution=distribution, version=version, entry_point=entry_point
        )


class ResolutionError(XformError):
    """A request cannot be turned into an ordered pipeline."""


class UnknownNameError(ResolutionError):
    """A name that no installed distribution provides. Attributes: ``name``, ``known``."""

    name: str
    known: tuple[str, ...]


class UnknownOptionError(ResolutionError):
    """A plugin has no such option. Attributes: ``plugin``, ``distribution``, ``option``, ``known``."""

    plugin: str
    distribution: str
    option: str
    known: tuple[str, ...]

    def __init__(self, *, plugin: str, distribution: str, option: str, known: Iterable[str]) -> None:
        known = tuple(known)
        what = f"Its options are {spell(known)}." if known else "It takes no options."
        super().__init__(
            f"{plugin!r} [{distribution}] has no option {option!r}.{closest(option, known)}",
            what,
            plugin=plugin,
            distribution=distribution,
            option=option,
            known=known,
        )


class CycleError(ResolutionError):
    """The declared order contradicts itself. Attributes: ``cycle`` (names), ``edges`` (one line per edge)."""

    cycle: tuple[str, ...]
    edges: tuple[str, ...]


class ConflictError(ResolutionError):
    """Two plugins exclude each other. Attributes: ``names``, ``claims`` (one line per declaration)."""

    names: tuple[str, ...]
    claims: tuple[str, ...]


class MissingRequirementError(ResolutionError):
    """Something required is not installed, or not uniquely.

    Attributes: ``plugin``, ``distribution``, ``requirement``, ``candidates``.
    """

    plugin: str
    distribution: str
    requirement: str
    candidates: tuple[str, ...]


class HostVersionError(ResolutionError):
    """The installed Thunder, torch or Python is outside what a plugin declares.

    Attributes: ``plugin``, ``distribution``, ``unmet`` (one comparison per entry).
    """

    plugin: str
    distribution: str
    unmet: tuple[str, ...]


class DuplicateClaimError(ResolutionError):
    """Several distributions claim one plugin name. Attributes: ``name``, ``distributions``."""

    name: str
    distributions: tuple[str, ...]

    def __init__(self, *, name: str, distributions: Iterable[str]) -> None:
        distributions = tuple(distributions)
        super().__init__(
            f"{name!r} is claimed by {len(distributions)} installed distributions: {spell(distributions)}.",
            "Uninstall all but one, or exclude the others with deny=[...] or THUNDER_XFORM_DENY.",
            name=name,
            distributions=distributions,
        )


class DuplicateRequestError(ResolutionError):
    """A request names one plugin twice, or gives one option two values. Attributes: ``name``, ``option``."""

    name: str
    option: str


class UnorderedEffectsError(ResolutionError):
    """Two plugins touch the same state and nothing orders them.

    Attributes: ``names``, ``effects`` (pairs of what clashes).
    """

    names: tuple[str, str]
    effects: tuple[tuple[str, str], ...]


class DeniedError(ResolutionError):
    """A plugin is installed, but an allow or deny list excludes it.

    Attributes: ``name``, ``distribution``, ``source`` (which list).
    """

    name: str
    distribution: str
    source: str


class RequestSyntaxError(ResolutionError):
    """The text form of a request cannot be read. Attributes: ``text``, ``position`` (0-based column)."""

    text: str
    position: int

    def __init__(self, problem: str, remedy: str = "", *, text: str = "", position: int = 0) -> None:
        remedy = remedy or "Write it as 'lora(r=8) + fsdp(zero=3)', with literals as values."
        super().__init__(problem, remedy, text=text, position=position)


class LoadError(XformError):
    """The code of a requested plugin cannot be imported or instantiated; the cause is chained.

    Attributes: ``plugin``, ``distribution``, ``version``, ``entry_point``, ``target`` (``"module:Class"``).
    """

    plugin: str
    distribution: str
    version: str
    entry_point: str
    target: str


class OptionError(XformError):
    """A value that an option does not take.

    Attributes: ``plugin``, ``distribution``, ``option``, ``value`` (its repr).
    """

    plugin: str
    distribution: str
    option: str
    value: str


class VerificationError(XformError):
    """A plugin left the parameters or traces in an inconsistent state.

    Attributes:
        plugin, distribution, hook: who did it, and where.
        detail: what is inconsistent.
        before, after: the trace as text before and after the hook.
    """

    plugin: str
    distribution: str
    hook: str
    detail: str
    before: str
    after: str

    def __init__(
        self, plugin: str, distribution: str, hook: str, detail: str, before: str = "", after: str = ""
    ) -> None:
        super().__init__(
            f"{plugin!r} [{distribution}] broke an invariant in {hook}: {detail.rstrip('.')}.",
            "Report it to the plugin's authors"
            + (", with the traces in this error's `before` and `after`." if before or after else "."),
            plugin=plugin,
            distribution=distribution,
            hook=hook,
            detail=detail,
            before=before,
            after=after,
        )


class CheckError(XformError):
    """A compiled model computes something else than the plain one in eager PyTorch.

    Attributes:
        kind: what departs first: ``"output"``, ``"buffer"``, ``"gradient"`` or ``"input gradient"``.
        name: its number, or the name of the parameter or buffer.
        detail: how it differs.
        operator: the first operator whose result departs, and where it is called; empty if only gradients depart, or
            it was not found.
        plugin: the plugin without which it does not; empty if there is no such.
    """

    kind: str
    name: str
    detail: str
    operator: str
    plugin: str


class PipelineError(XformError):
    """A pipeline is used in a way that it does not support, such as for a second model."""


class TracingError(PipelineError):
    """What a model does when it runs cannot be compiled; Thunder's own error, if there is one, is chained.

    Attributes: ``place`` (``"file:line: code"`` of the user's code).
    """

    place: str


class ParallelError(XformError):
    """Process groups, meshes or ranks are not as a plugin needs them."""


class CheckpointError(XformError):
    """A checkpoint cannot be written, read, or applied to this pipeline."""
