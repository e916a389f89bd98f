"""Import and instantiate the plugins of a resolution: the one place where plugin code is executed."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from typing import Any

from thunder_xform.errors import LoadError, OptionError, UnknownOptionError, XformError
from thunder_xform.registry._values import convert_option
from thunder_xform.registry.resolution import Resolution
from thunder_xform.registry.step import Step

__all__ = ["load", "load_class"]

#: What the code of a plugin may raise without ending the program; `sys.exit()` there is a fault like any other.
_FAULTS = (Exception, SystemExit)


def load(resolution: Resolution) -> tuple[tuple[Step, Any], ...]:
    """A plugin object for each step, in order.

    Raises:
        LoadError: a class cannot be imported or instantiated.
        OptionError, UnknownOptionError: the options class refuses a value or a name.
    """
    # All classes are imported, and all options built, before the first plugin object is made.
    prepared = [(step, *_prepare(step)) for step in resolution.steps]
    return tuple((step, _instantiate(step, cls, arguments)) for step, cls, arguments in prepared)


def load_class(step: Step, target: str) -> Any:
    """The class ``"module:Class"`` of `step`. Raises `LoadError` with the cause chained."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except _FAULTS as cause:
        raise _load_error(step, target, "cannot be imported", cause) from cause


def _prepare(step: Step) -> tuple[Any, tuple[Any, ...]]:
    if step.instance is not None or step.manifest.plugin is None:
        return None, ()
    cls = load_class(step, step.manifest.plugin)
    if step.manifest.options is None:
        return cls, ()
    return cls, (_build_options(step, load_class(step, step.manifest.options)),)


def _instantiate(step: Step, cls: Any, arguments: tuple[Any, ...]) -> Any:
    if step.instance is not None:
        return step.instance
    try:
        return cls(*arguments)
    except XformError:
        raise
    except _FAULTS as cause:
        raise _load_error(step, step.manifest.plugin or "", "cannot be instantiated", cause) from cause


def _build_options(step: Step, cls: Any) -> Any:
    values = dict(step.options)
    if dataclasses.is_dataclass(cls):
        known = {field.name: field for field in dataclasses.fields(cls) if field.init}
        for name in values:
            if name not in known:
                raise UnknownOptionError(plugin=step.name, distribution=step.origin, option=name, known=known)
        hints = _hints(cls)
        for name, value in values.items():
            values[name] = convert_option(step.name, step.origin, name, value, hints.get(name, Any))
        missing = [name for name, field in known.items() if name not in values and _required(field)]
        if missing:
            raise OptionError(
                f"{step.name!r} [{step.origin}] needs the option {missing[0]!r}.",
                f"Give it: ({step.name!r}, {{{missing[0]!r}: ...}}).",
                plugin=step.name,
                distribution=step.distribution,
                option=missing[0],
                value="",
            )
    try:
        return cls(**values)
    except XformError:
        raise
    except (ValueError, TypeError) as error:
        raise OptionError(
            f"{step.name!r} [{step.origin}] refuses its options: {str(error).rstrip('.')}.",
            f"They were {', '.join(f'{k}={v!r}' for k, v in values.items()) or 'all defaults'}.",
            plugin=step.name,
            distribution=step.distribution,
            option="",
            value="",
        ) from error
    except _FAULTS as cause:
        raise _load_error(step, step.manifest.options or "", "cannot be instantiated", cause) from cause


def _hints(cls: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception:  # An annotation that needs an import the module makes for type checkers only.
        return {}


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _load_error(step: Step, target: str, what: str, cause: BaseException) -> LoadError:
    announced = f", entry point {step.entry_point!r}" if step.entry_point else ""
    return LoadError(
        f"{step.name!r} [{step.origin}{announced}]: {target!r} {what} ({type(cause).__name__}: {cause}).",
        f"Install what it misses, or reinstall it: pip install --force-reinstall {step.distribution}",
        plugin=step.name,
        distribution=step.distribution,
        version=step.version,
        entry_point=step.entry_point,
        target=target,
    )
