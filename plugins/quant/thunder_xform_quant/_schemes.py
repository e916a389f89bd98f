"""From the option ``scheme`` to a scheme."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import thunder_xform as tx
from thunder_xform_quant.fourbit import FP4, NF4
from thunder_xform_quant.int8 import Int8
from thunder_xform_quant.options import Options
from thunder_xform_quant.scheme import Scheme

_BUILT_IN: dict[str, Callable[..., object]] = {"fp4": FP4, "int8": Int8, "nf4": NF4}


def find_scheme(options: Options, ctx: tx.Context) -> Scheme:
    """The scheme that the options name, with their settings.

    Raises:
        OptionError: there is none, it does not take these settings, or something that it needs is not installed.
    """
    make = _imported(options.scheme, ctx) if ":" in options.scheme else _offered(options.scheme, ctx)
    settings: dict[str, object] = {"blocksize": options.blocksize, "double_quant": options.double_quant}
    given = {name: value for name, value in settings.items() if value is not None}
    taken = inspect.signature(make).parameters
    for name, value in given.items():
        if name not in taken:
            problem = f"Scheme {options.scheme!r} takes no `{name}`, but it is {value!r}."
            raise ctx.option_error(name, value, problem, f"Leave out `{name}`.")
    try:
        scheme = make(**given)
    except ModuleNotFoundError as error:
        extra = "thunder-xform-quant[bitsandbytes]" if error.name == "bitsandbytes" else error.name
        raise ctx.option_error(
            "scheme",
            options.scheme,
            f"Scheme {options.scheme!r} needs {error.name}, which is not installed.",
            f"Run pip install '{extra}', or use scheme='int8', which needs nothing.",
        ) from error
    except ValueError as error:
        name = next((name for name in given if f"`{name}`" in str(error)), "scheme")
        value = given.get(name, options.scheme)
        raise ctx.option_error(name, value, f"{error}.", "Correct the option.") from error
    if not isinstance(scheme, Scheme):
        problem = f"`scheme` {options.scheme!r} made a {type(scheme).__name__}, which is no Scheme."
        raise ctx.option_error("scheme", options.scheme, problem, "Subclass thunder_xform_quant.Scheme.")
    return scheme


def _offered(name: str, ctx: tx.Context) -> Callable[..., object]:
    """The scheme called ``name``: built in, or offered by one plugin of the pipeline."""
    known = {known: (make, ctx.plugin) for known, make in _BUILT_IN.items()}
    for plugin, instance in ctx.plugins().items():
        for offered, make in getattr(instance, "quant_schemes", {}).items():
            if offered in known:
                problem = f"The scheme {offered!r} of plugin {plugin!r} is one of {known[offered][1]!r}, too."
                raise ctx.option_error("scheme", name, problem, "Rename it, or leave out one of the plugins.")
            known[offered] = (make, plugin)
    if name not in known:
        raise ctx.option_error(
            "scheme",
            name,
            f"There is no scheme {name!r}.{tx.errors.closest(name, known)}",
            f"Use one of {tx.errors.spell(sorted(known))}, request the plugin that offers it, or write 'module:Class'.",
        )
    return known[name][0]


def _imported(path: str, ctx: tx.Context) -> Callable[..., object]:
    """The class at ``"module:Class"``."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"The scheme {path!r} cannot be imported ({error})."
        raise ctx.option_error("scheme", path, problem, "Write an importable 'module:Class'.") from error
    if not (isinstance(found, type) and issubclass(found, Scheme)):
        problem = f"The scheme {path!r} is no subclass of thunder_xform_quant.Scheme."
        raise ctx.option_error("scheme", path, problem, "Name a subclass of it.")
    return found
