"""Where a value that Thunder's interpreter has in hand comes from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from thunder.core.interpreter import PseudoInst, get_interpreterruntimectx

#: what is not made by the code that is traced: arguments, and what functions refer to, globals and closures
_ARGUMENTS = ("INPUT_ARGS", "INPUT_KWARGS")
_FUNCTION = ("INPUT_FN",)


def real(wrapped: Any) -> Any:
    """The user's own object that the interpreter has in hand, perhaps through a copy of its own."""
    if wrapped.original_value is not wrapped.nothing:
        return wrapped.original_value
    origin = wrapped.provenance
    if origin.inst is PseudoInst.LOAD_ATTR and origin.inputs[1].value == "__self__":
        # Reached through a method of the copy, which does not lead back to what was copied.
        for proxied in get_interpreterruntimectx()._proxied_values:
            if proxied.value is wrapped.value:
                return real(proxied)
    return wrapped.value


def is_given(provenance: Any) -> bool:
    """Whether something is part of an argument or reached from a function: no result of an operation."""
    return _leads_to(provenance, (*_ARGUMENTS, *_FUNCTION))


def is_global(provenance: Any) -> bool:
    """Whether something is reached from the traced function itself, through its globals or what it closes over."""
    return _leads_to(provenance, _FUNCTION)


def _leads_to(provenance: Any, roots: Collection[str], steps: int = 0) -> bool:
    inst = getattr(provenance.inst, "value", provenance.inst)
    if inst in roots:
        return steps > 0
    return inst in ("LOAD_ATTR", "BINARY_SUBSCR") and _leads_to(provenance.inputs[0], roots, steps + 1)
