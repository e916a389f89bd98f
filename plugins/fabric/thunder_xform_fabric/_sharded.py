"""Sharded checkpoints: a directory that torch.distributed.checkpoint writes and any number of ranks reads.

Keys are torch's: ``<key>.<parameter>`` for models, ``<key>.state.<parameter>.<slot>`` for optimizers. What is no tensor
lies in ``meta.pt``, as in Fabric's own sharded checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.nn import Module
from torch.optim import Optimizer

import thunder_xform as tx
from thunder_xform_fabric._lightning import validate_keys
from thunder_xform_fabric._module import is_transformed

_METADATA = "meta.pt"
#: Where ``meta.pt`` keeps the groups of optimizers and the slots that are no tensors.
_OPTIMIZERS = "thunder_xform_optimizers"
#: Slots of torch's optimizers that are scalars for every parameter.
_SCALARS = frozenset({"eta", "mu", "mu_product", "step"})


def is_sharded(path: Path) -> bool:
    """Whether a sharded checkpoint lies at ``path``."""
    return path.is_dir() and (path / _METADATA).is_file()


def save(path: Path, state: Mapping[str, Any], main: bool) -> None:
    """Write models and optimizers as shards, the rest from the main rank. A collective."""
    handle = _handle(state)
    names = {id(p): name for name, p in handle.parameters.items()}
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {}
    optimizers: dict[str, Any] = {}
    for key, item in state.items():
        if isinstance(item, Module):
            tensors |= _module_tensors(key, item)
        elif isinstance(item, Optimizer):
            slots = {}
            for parameter, values in item.state.items():
                name = names[id(parameter)]
                for slot, value in values.items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"{key}.state.{name}.{slot}"] = _placed(handle, name, slot, value)
                    else:
                        slots[name, slot] = value
            groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in item.param_groups]
            optimizers[key] = {"groups": groups, "slots": slots}
        else:
            rest[key] = item.state_dict() if hasattr(item, "state_dict") else item
    path.mkdir(parents=True, exist_ok=True)
    write_shards(tensors, checkpoint_id=path)
    if main:
        torch.save({**rest, _OPTIMIZERS: optimizers}, path / _METADATA)


def load(path: Path, state: Any, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Read into the objects of ``state``; returns what was not asked for. A collective.

    Raises:
        CheckpointError: ``state`` lacks the model, or the checkpoint lacks some of it.
        KeyError: ``strict``, and the checkpoint lacks a key.
    """
    if isinstance(state, Module):
        read_shards(_known(path, _module_tensors("", state), strict), checkpoint_id=path)
        return {}
    if not isinstance(state, dict):
        raise tx.errors.CheckpointError(
            f"{path} is a sharded checkpoint; it cannot be loaded into {type(state).__name__}.",
            "Pass a dictionary that contains the model: fabric.load(path, {'model': model, ...}).",
        )
    handle = _handle(state)
    rest = torch.load(path / _METADATA, weights_only=weights_only)
    optimizers = rest.pop(_OPTIMIZERS)
    validate_keys([k for k, item in state.items() if not isinstance(item, Module | Optimizer)], rest.keys(), strict)
    tensors = _known(path, _models(state), strict)
    slots: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for key, item in state.items():
        if isinstance(item, Optimizer):
            validate_keys([key], optimizers.keys(), strict)
            slots[key] = _empty_slots(path, key, item, handle)
            for name, values in slots[key].items():
                for slot, value in values.items():
                    tensors[f"{key}.state.{name}.{slot}"] = _placed(handle, name, slot, value)
    read_shards(tensors, checkpoint_id=path)
    for key, values_by_name in slots.items():
        _fill(state[key], values_by_name, optimizers[key], handle)
    for key, item in state.items():
        if key in rest and not isinstance(item, Module | Optimizer):
            value = rest.pop(key)
            if hasattr(item, "load_state_dict"):
                item.load_state_dict(value)
            else:
                state[key] = value
    return dict(rest)


def _handle(state: Mapping[str, Any]) -> tx.Handle:
    models = [item for item in state.values() if isinstance(item, Module) and is_transformed(item)]
    if len(models) != 1:
        raise tx.errors.CheckpointError(
            f"A sharded checkpoint holds one transformed model, but the state has {len(models)}.",
            "Set up the model through Fabric and pass it: {'model': model, ...}; other models go to other paths.",
        )
    return tx.handle(models[0])


def _module_tensors(key: str, module: Module) -> dict[str, torch.Tensor]:
    """Tensors of a model by their key in the checkpoint; DTensors where they are sharded."""
    prefix = f"{key}." if key else ""
    if not is_transformed(module):
        return {prefix + name: tensor for name, tensor in module.state_dict().items()}
    handle = tx.handle(module)
    return {prefix + name: _as_rows(handle.distributed(name, t)) for name, t in handle.state_dict("sharded").items()}


def _models(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for key, item in state.items():
        if isinstance(item, Module):
            tensors |= _module_tensors(key, item)
    return tensors


def _known(path: Path, tensors: dict[str, torch.Tensor], strict: bool) -> dict[str, torch.Tensor]:
    saved = _stored(path)
    missing = [key for key in tensors if key not in saved]
    if missing and strict:
        raise tx.errors.CheckpointError(
            f"{path} lacks {missing[0]!r}" + (f" and {len(missing) - 1} more." if missing[1:] else "."),
            "Load a checkpoint of the same model and pipeline, or pass strict=False.",
            missing=tuple(missing),
        )
    return {key: tensor for key, tensor in tensors.items() if key in saved}


def _stored(path: Path) -> Mapping[str, Any]:
    return FileSystemReader(path).read_metadata().state_dict_metadata


def _placed(handle: tx.Handle, name: str, slot: str, value: torch.Tensor) -> torch.Tensor:
    """A slot of an optimizer's state: sharded as its parameter if it is shaped like it, else equal on all ranks."""
    if value.dim() == 0 and (slot in _SCALARS or handle.parameters[name].dim()):
        return value
    return _as_rows(handle.distributed(name, value))


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar as one row, which it is when it is sharded."""
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _empty_slots(path: Path, key: str, optimizer: Optimizer, handle: tx.Handle) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors to read the saved slots of each parameter into."""
    live = handle.parameters
    names = {id(p): name for name, p in live.items()}
    held = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    saved = _stored(path)
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in held}
    for name in held:
        prefix = f"{key}.state.{name}."
        for full_key, stored in saved.items():
            slot = full_key.removeprefix(prefix)
            if full_key.startswith(prefix) and "." not in slot and isinstance(stored, TensorStorageMetadata):
                dtype = stored.properties.dtype
                like = live[name].detach()
                found[name][slot] = torch.empty_like(like, dtype=dtype) if stored.size else torch.empty((), dtype=dtype)
    return found


def _fill(
    optimizer: Optimizer, tensors: dict[str, dict[str, torch.Tensor]], saved: Mapping[str, Any], handle: tx.Handle
) -> None:
    live = handle.parameters
    if [len(g["params"]) for g in saved["groups"]] != [len(g["params"]) for g in optimizer.param_groups]:
        raise tx.errors.CheckpointError(
            f"The saved {type(optimizer).__name__} has other groups of parameters than this one.",
            "Build the optimizer as it was when the checkpoint was saved.",
        )
    optimizer.state.clear()
    for name, slots in tensors.items():
        optimizer.state[live[name]].update(slots)
    for (name, slot), value in saved["slots"].items():
        optimizer.state[live[name]][slot] = value
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({k: v for k, v in stored.items() if k != "params"})
