"""What traced code makes of numbers and tensors whose values are only known when it runs: decisions and text.

Thunder compares an unknown number as if it were None, and text of a proxy is the proxy's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from thunder.core.interpreter import interpreter_needs_wrap, wrap_const
from thunder.core.jit_ext import _general_jit_lookaside_map, get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy
from torch.utils._pytree import tree_leaves

from thunder_xform.errors import TracingError
from thunder_xform.host.places import in_users_code, is_raising, place

_CHOOSE = (max, min, sorted)
_SPELL = (str, repr, ascii, format, str.format, str.format_map)


def lookasides() -> dict[Any, Callable[..., Any]]:
    """What Thunder's interpreter calls in place of what decides by values; it gives its own wrapped values."""
    return {
        bool: _bool,
        isinstance: _isinstance,
        hash: functools.partial(_hash, hash),
        **{fn: functools.partial(_chosen, fn) for fn in _CHOOSE},
        **{fn: functools.partial(_spelled, fn) for fn in _SPELL},
    }


def _bool(*args: Any) -> Any:
    if args:
        _refuse_unknown(args[0].value)
    return _general_jit_lookaside_map[bool](*args)


def _isinstance(value: Any, kinds: Any) -> Any:
    if isinstance(value.value, NumberProxy) and in_users_code():
        return wrap_const(issubclass(value.value.python_type, kinds.value))
    return _general_jit_lookaside_map[isinstance](value, kinds)


def _hash(fn: Any, value: Any) -> Any:
    _refuse_unknown(value.value)
    return interpreter_needs_wrap(fn)(value)


def _chosen(fn: Any, *args: Any, **kwargs: Any) -> Any:
    for leaf in tree_leaves([argument.value for argument in args]):
        _refuse_unknown(leaf)
    return interpreter_needs_wrap(fn)(*args, **kwargs)


def refuse_text_of(*values: Any) -> None:
    """Raise unless text can be made of ``values`` while a call is traced, or is that of an exception.

    Raises:
        TracingError: one is a tensor, or a number that comes from one.
    """
    unknown = any(isinstance(leaf, TensorProxy) or _is_unknown(leaf) for leaf in tree_leaves(values))
    if unknown and not is_raising():
        where = place()
        raise TracingError(
            f"The model makes text of values that are only known when it runs ({where}).",
            "Return them and make the text outside of forward, or print them there.",
            place=where,
        )


def _spelled(fn: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_text_of(*(argument.value for argument in (*args, *kwargs.values())))
    known = [_known(argument) for argument in args], {name: _known(argument) for name, argument in kwargs.items()}
    return interpreter_needs_wrap(fn)(*known[0], **known[1])


def _known(wrapped: Any) -> Any:
    return wrap_const(wrapped.value.value) if isinstance(wrapped.value, NumberProxy) else wrapped


def _refuse_unknown(number: Any) -> None:
    if _is_unknown(number):
        where = place()
        raise TracingError(
            f"The model decides by a number that is only known when it runs ({where}).",
            "Compute both ways and choose with torch.where, or take the decision outside of forward.",
            place=where,
        )


def _is_unknown(number: Any) -> bool:
    """Whether it is a number that comes from a tensor's data: Thunder compares it as if it were None."""
    if not isinstance(number, NumberProxy):
        return False
    unknown: set[str] = set()
    for bsym in [b for scope in get_jit_ctx().computation_trace.scopes for b in scope]:
        made = [o for o in bsym.flat_proxy_outs if isinstance(o, NumberProxy)]
        if any(o.value is None for o in made) or not unknown.isdisjoint(a.name for a in bsym.flat_proxy_args):
            unknown |= {o.name for o in made}
    return number.value is None or number.name in unknown
