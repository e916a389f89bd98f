"""Adapters in a file: tensors and the options they were trained under, in one safetensors file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from thunder_xform.checkpoint.state import export_state, import_state
from thunder_xform.errors import CheckpointError
from thunder_xform.parallel.agreement import together

if TYPE_CHECKING:
    from thunder_xform.context import Session

_FORMAT = "thunder-xform adapter 1"
_T = TypeVar("_T")


class Handle(Protocol):
    """What is needed of a :class:`thunder_xform.Handle`."""

    @property
    def _session(self) -> Session: ...


def save_adapter(handle: Handle, path: str | os.PathLike[str]) -> None:
    """Write the adapters of a model, and the options of the plugins that added them.

    Call it on every rank; the first one writes. The file appears when it is complete.

    Raises:
        CheckpointError: the pipeline has no adapters.
        OSError: the file cannot be written.
    """
    state = export_state(handle._session, "adapter")
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    metadata = {"format": _FORMAT, "plugins": json.dumps(_options(handle))}
    unfinished = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    try:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, unfinished, metadata)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def adapter_request(path: str | os.PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """The adapter plugins of a file with their options, as a request for ``registry.resolve``.

    Raises:
        CheckpointError: the file cannot be read or is none that :func:`save_adapter` wrote.
    """
    metadata = _reading(path, _metadata)
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(
            f"{os.fspath(path)} is a safetensors file, but not one of the format {_FORMAT!r}.",
            "Pass a file that save_adapter wrote.",
            path=os.fspath(path),
        )
    try:
        plugins = json.loads(metadata["plugins"])
    except (KeyError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(plugins, dict) or not all(isinstance(options, dict) for options in plugins.values()):
        raise _damaged(path, "no options by plugin")
    return list(plugins.items())


def _damaged(path: str | os.PathLike[str], what: str) -> CheckpointError:
    return CheckpointError(
        f"The metadata of {os.fspath(path)} do not say which plugins its adapters are of ({what}).",
        "The file is damaged or was edited; save the adapters again.",
        path=os.fspath(path),
    )


def load_adapter(handle: Handle, path: str | os.PathLike[str]) -> None:
    """Read adapters into a model that has them under the same options.

    Call it on every rank.

    Raises:
        CheckpointError: the file cannot be read, or plugins, options, names or shapes differ; nothing is
            changed then.
        ParallelError: another rank could not read its file; nothing is changed here either.
    """
    with together(handle._session.groups, "load_adapter"):
        saved, here = dict(adapter_request(path)), _options(handle)
        if saved != here:
            raise CheckpointError(
                f"{os.fspath(path)} holds adapters of {_text(saved)}, but the model has {_text(here)}.",
                "Resolve the pipeline from adapter_request(path), or give the tensors to handle.load_state_dict.",
                path=os.fspath(path),
            )
        tensors = _reading(path, load_file)
    import_state(handle._session, tensors, "adapter")


def _options(handle: Handle) -> dict[str, dict[str, Any]]:
    """Options of the adapter plugins by name, in the types that JSON has."""
    members = zip(handle._session.steps, handle._session.plugins, strict=True)
    options = {step.name: _values(plugin.options) for step, plugin in members if step.manifest.stage == "adapters"}
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(options))
    return plain


def _values(options: Any) -> dict[str, Any]:
    return dataclasses.asdict(options) if dataclasses.is_dataclass(type(options)) else {}


def _metadata(path: str) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def _reading(path: str | os.PathLike[str], read: Callable[[str], _T]) -> _T:
    try:
        return read(os.fspath(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{os.fspath(path)} cannot be read as a safetensors file ({error}).",
            "Check the path and that the file is complete.",
            path=os.fspath(path),
        ) from error


def _text(plugins: dict[str, dict[str, Any]]) -> str:
    return " + ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in o.items())})" for n, o in plugins.items())
