"""Which tensors belong to which kind of state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from thunder_xform.errors import CheckpointError
from thunder_xform.host.ledger import MODEL, MODEL_STAGE

if TYPE_CHECKING:
    from thunder_xform.context import Session


def plain_shapes(session: Session) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the plain model's ``state_dict()``, in its order: tied tensors under all names, no
    non-persistent buffers.

    Raises:
        CheckpointError: a key that is neither a parameter nor a buffer.
    """
    shapes = {}
    for key in session.ledger.module._model.state_dict(keep_vars=True):
        version = session.ledger.at(key, MODEL_STAGE) if key in session.ledger else None
        if version is None:
            raise CheckpointError(
                f"The model's state_dict() has the key {key!r}, which is no parameter or buffer.",
                "Extra state and hooks that rename keys are not supported; save kind='adapter' or 'sharded'.",
                key=key,
            )
        shapes[key] = version.shape
    return shapes


def plain_dtypes(session: Session, keys: Iterable[str]) -> dict[str, torch.dtype]:
    """Dtypes that the plain model has its parameters and buffers in, for keys of :func:`plain_shapes`."""
    versions = {key: session.ledger.at(key, MODEL_STAGE) for key in keys}
    return {key: version.dtype for key, version in versions.items() if version is not None}


def stored_names(session: Session, kind: str) -> tuple[str, ...]:
    """Names of the live tensors that a state of this kind is made from, tied ones once."""
    ledger = session.ledger
    origins = {name: ledger.latest(name).origin for name in ledger}
    if kind == "adapter":
        adapters = {step.name for step in session.steps if step.manifest.stage == "adapters"}
        if not adapters:
            raise CheckpointError(
                f"The pipeline {' -> '.join(session.names)} has no adapters.",
                "Use kind='full', or request an adapter plugin such as 'lora'.",
                kind=kind,
            )
        return tuple(name for name, origin in origins.items() if origin in adapters)
    transient = _non_persistent(session)
    return tuple(n for n, o in origins.items() if o != MODEL or not transient.issuperset(ledger.aliases(n)))


def _non_persistent(session: Session) -> frozenset[str]:
    """Names of buffers that the model itself keeps out of its ``state_dict()``."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in session.ledger.module._model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )
