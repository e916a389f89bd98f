"""What a plugin declares about itself: static data, read from TOML without executing plugin code."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from thunder_xform.errors import ManifestError, closest, spell

__all__ = ["EFFECTS", "SCHEMA", "STAGES", "Effects", "Manifest"]

#: The version of the manifest format that this package reads.
SCHEMA = 1

#: The stages of a pipeline, first to last. Every plugin of a stage runs before every plugin of a later one.
STAGES = ("weights", "adapters", "distribute", "schedule")

_OF_TENSORS = ("set", "shape", "layout", "dtype", "device", "requires_grad", "data")
#: The state that is looked at when a plugin's hooks ran; ``trace.compute`` may be followed by an operator's name.
EFFECTS = (
    *("params", *(f"params.{part}" for part in _OF_TENSORS)),
    *("buffers", *(f"buffers.{part}" for part in _OF_TENSORS)),
    *("trace", "trace.compute", "trace.collectives", "trace.saved"),
)


@dataclass(frozen=True, slots=True)
class Effects:
    """Named state that a plugin reads and writes, such as ``params.layout``; a prefix covers all below it."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The declarations of one plugin, or of a bundle (a manifest without ``plugin``).

    *Names* are lower-case identifiers.  *Capabilities* are dotted (``parallel.shard``).  An *edge* names
    either, or all capabilities below a prefix (``weights.*``).  A bundle stands for the plugins it requires
    and may preset their options; it is replaced by them and is no step of its own.
    """

    schema: int = SCHEMA
    #: The name under which the plugin is requested.
    name: str
    #: One line for ``thunder-xform list``.
    summary: str = ""
    #: ``"module:Class"``, instantiated as ``Class(options)``, or ``Class()`` where there are no options.
    plugin: str | None = None
    #: ``"module:Class"`` of a dataclass that needs the standard library and what of thunder_xform needs no torch.
    #: Its annotations are checked without importing it; ``Annotated[int, ">= 1"]`` states a range.
    options: str | None = None
    #: One of `STAGES`; ``None`` for a bundle.
    stage: str | None = None
    #: Capabilities that other plugins can require, order against, or conflict with.
    provides: tuple[str, ...] = ()
    #: Names or capabilities that must be in the pipeline; pulled in where that is unambiguous.
    requires: tuple[str, ...] = ()
    #: As `requires`, but left out where not installed.
    wants: tuple[str, ...] = ()
    #: Order only: where present, these run earlier.
    after: tuple[str, ...] = ()
    #: Order only: where present, these run later.
    before: tuple[str, ...] = ()
    #: These may not be in the same pipeline. One's own capability here means "at most one provider".
    conflicts: tuple[str, ...] = ()
    #: The author's claim that the order against these does not matter, although the effects overlap.
    commutes: tuple[str, ...] = ()
    #: State read and written.
    effects: Effects = Effects()
    #: Resource -> options whose values identify it: no two plugins of a pipeline may occupy the same one.
    exclusive: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Distribution (or ``python``) -> version specifier.
    host: Mapping[str, str] = field(default_factory=dict)
    #: Bundles only: plugin name -> preset options.
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_bundle(self) -> bool:
        """Whether this stands for other plugins and has no code of its own."""
        return self.plugin is None

    def matches(self, pattern: str) -> bool:
        """Whether an edge's `pattern` names this plugin or a capability it provides."""
        if pattern.endswith(".*"):
            return any(capability.startswith(pattern[:-1]) for capability in self.provides)
        return pattern == self.name or pattern in self.provides

    @classmethod
    def parse(cls, text: str, *, file: str = "manifest.toml", distribution: str = "") -> Manifest:
        """Read a manifest from TOML text.

        Raises:
            ManifestError: naming `file`, `distribution`, the field, and the form wanted.
        """
        import tomllib

        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ManifestError(
                f"not valid TOML: {error}.", "Correct the syntax there.", file=file, distribution=distribution
            ) from None
        except (MemoryError, RecursionError, ValueError) as error:
            # Brackets nested by the thousand, numbers of too many digits: the parser has no error of its own for these.
            raise ManifestError(
                f"not readable as TOML ({type(error).__name__}).",
                "Correct what is nested too deeply or too long there.",
                file=file,
                distribution=distribution,
            ) from None
        return _Reader(table, file, distribution).manifest()

    @classmethod
    def read(cls, path: Path, *, file: str = "", distribution: str = "") -> Manifest:
        """Read the manifest at `path`, called `file` in messages. Raises `ManifestError`, as `parse` does."""
        file = file or str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ManifestError(
                f"cannot be read ({reason}).",
                "Ship it with the package as a UTF-8 text file.",
                file=file,
                distribution=distribution,
            ) from error
        return cls.parse(text, file=file, distribution=distribution)


_SEGMENT = r"[a-z][a-z0-9_]*"
_NAME = (re.compile(_SEGMENT), "a lower-case identifier such as 'lora'")
_CAPABILITY = (re.compile(rf"{_SEGMENT}(\.{_SEGMENT})+"), "a dotted capability such as 'parallel.shard'")
_STATE = (re.compile(rf"{_SEGMENT}(\.{_SEGMENT})*"), "a dotted name such as 'params.layout'")
_EDGE = (
    re.compile(rf"{_SEGMENT}(\.{_SEGMENT})*(\.\*)?"),
    "a plugin ('lora'), a capability ('parallel.shard') or a prefix of capabilities ('weights.*')",
)
_TARGET = (re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"), "'module:Class'")
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_SPECIFIER = re.compile(r"\s*(~=|==|!=|<=|>=|<|>|===)\s*[\w.*+!-]+\s*(,\s*(~=|==|!=|<=|>=|<|>|===)\s*[\w.*+!-]+\s*)*")
_LINE = (re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*"), "one line of text without control characters")
_Form = tuple[re.Pattern[str], str]

_EDGE_FIELDS = ("requires", "wants", "after", "before", "conflicts", "commutes")
_FIELDS = tuple(Manifest.__dataclass_fields__)
_BUNDLE_FIELDS = ("schema", "name", "summary", "requires", "defaults", "host")


class _Reader:
    """Checks a decoded TOML table field by field."""

    def __init__(self, table: Mapping[str, Any], file: str, distribution: str) -> None:
        self._table = table
        self._file = file
        self._distribution = distribution

    def manifest(self) -> Manifest:
        self._known(self._table, _FIELDS)
        schema = self._table.get("schema")
        if schema != SCHEMA or isinstance(schema, bool):
            if isinstance(schema, int) and schema > SCHEMA:
                self._fail("schema", f"`schema` is {schema}, newer than {SCHEMA}.", "Upgrade thunder-xform.")
            self._fail("schema", self._is("schema", schema), f"Write `schema = {SCHEMA}`.")
        name = self._text("name", _NAME)
        if not name or keyword.iskeyword(name):
            self._fail("name", self._is("name", name), f"Give {_NAME[1]}.")
        for key in _EDGE_FIELDS:
            if name in self._names(self._table, key, _EDGE):
                self._fail(key, f"`{key}` contains {name!r}, the plugin's own name.", "Remove it there.")
        bundle = "plugin" not in self._table
        if bundle:
            self._check_bundle()
        elif "defaults" in self._table:
            self._fail(
                "defaults",
                "`defaults` presets other plugins' options, which only a bundle may.",
                "Remove it.",
            )
        return Manifest(
            name=name,
            summary=self._text("summary", _LINE) or "",
            plugin=self._text("plugin", _TARGET),
            options=self._text("options", _TARGET),
            stage=None if bundle else self._stage(),
            provides=self._names(self._table, "provides", _CAPABILITY),
            requires=self._names(self._table, "requires", _EDGE),
            wants=self._names(self._table, "wants", _EDGE),
            after=self._names(self._table, "after", _EDGE),
            before=self._names(self._table, "before", _EDGE),
            conflicts=self._names(self._table, "conflicts", _EDGE),
            commutes=self._names(self._table, "commutes", _EDGE),
            effects=self._effects(),
            exclusive=self._exclusive(),
            host=self._host(),
            defaults=self._defaults(),
        )

    def _check_bundle(self) -> None:
        for key in self._table:
            if key not in _BUNDLE_FIELDS:
                remedy = f'Add `plugin = "module:Class"`, or keep to {spell(_BUNDLE_FIELDS)}.'
                self._fail(key, f"`{key}` has no meaning without `plugin` (a bundle).", remedy)
        if not self._table.get("requires"):
            remedy = 'Add `plugin = "module:Class"`, or `requires` for a bundle.'
            self._fail("plugin", "neither `plugin` nor `requires` is given.", remedy)

    def _stage(self) -> str:
        stage = self._table.get("stage")
        if stage not in STAGES:
            hint = closest(stage, STAGES) if isinstance(stage, str) else ""
            self._fail("stage", self._is("stage", stage) + hint, f"Use one of {spell(STAGES, 'or')}.")
        return str(stage)

    def _effects(self) -> Effects:
        table = self._subtable("effects")
        self._known(table, ("reads", "writes"), "effects.")
        return Effects(*(self._names(table, key, _STATE, "effects.") for key in ("reads", "writes")))

    def _exclusive(self) -> dict[str, tuple[str, ...]]:
        table = self._subtable("exclusive")
        for key in table:
            if not _STATE[0].fullmatch(key):
                self._fail("exclusive", f"`exclusive` has the key {key!r}.", f"Name a resource: {_STATE[1]}.")
        return {key: self._names(table, key, _NAME, "exclusive.") for key in table}

    def _host(self) -> dict[str, str]:
        table = self._subtable("host")
        for key, value in table.items():
            if not _DISTRIBUTION.fullmatch(key):
                self._fail(f"host.{key}", f"`host` has the key {key!r}.", "Name a distribution, or 'python'.")
            if not isinstance(value, str) or not _SPECIFIER.fullmatch(value):
                self._fail(f"host.{key}", self._is(f"host.{key}", value), "Give a specifier such as '>=0.2.6,<0.3'.")
        return dict(table)

    def _defaults(self) -> dict[str, dict[str, Any]]:
        table = self._subtable("defaults")
        for key, value in table.items():
            if not isinstance(value, dict):
                self._fail(f"defaults.{key}", self._is(f"defaults.{key}", value), f"Write a table [defaults.{key}].")
        return {key: dict(value) for key, value in table.items()}

    def _text(self, key: str, form: _Form) -> str | None:
        value = self._table.get(key)
        if value is not None and not (isinstance(value, str) and form[0].fullmatch(value)):
            self._fail(key, self._is(key, value), f"Give {form[1]}.")
        return value

    def _names(self, table: Mapping[str, Any], key: str, form: _Form, prefix: str = "") -> tuple[str, ...]:
        value = table.get(key, [])
        key = prefix + key
        if not isinstance(value, list):
            self._fail(key, self._is(key, value), f"Give a list; each entry is {form[1]}.")
        for entry in value:
            if not isinstance(entry, str) or not form[0].fullmatch(entry):
                self._fail(key, f"`{key}` contains {entry!r}.", f"Each entry is {form[1]}.")
        return tuple(dict.fromkeys(value))

    def _subtable(self, key: str) -> Mapping[str, Any]:
        value = self._table.get(key, {})
        if not isinstance(value, dict):
            self._fail(key, self._is(key, value), f"Give a table: [{key}].")
        return value

    def _known(self, table: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> None:
        for key in table:
            if key not in known:
                name = prefix + key
                self._fail(name, f"`{name}` is no field of a manifest.{closest(key, known)}", f"Use {spell(known)}.")

    @staticmethod
    def _is(key: str, value: object) -> str:
        return f"`{key}` is missing." if value is None else f"`{key}` is {value!r}."

    def _fail(self, field: str, problem: str, remedy: str) -> NoReturn:
        raise ManifestError(problem, remedy, file=self._file, field=field, distribution=self._distribution)
