"""Adapters in PEFT's files: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import thunder_xform as tx
from thunder_xform.errors import CheckpointError
from thunder_xform_lora._config import CONFIG_FILE, read_config, write_config
from thunder_xform_lora.options import Options

if TYPE_CHECKING:
    from thunder_xform_lora._adapter import Adapter
    from thunder_xform_lora.plugin import LoRA

WEIGHTS_FILE = "adapter_model.safetensors"
_OLD_WEIGHTS_FILE = "adapter_model.bin"
#: PEFT's names of parameters begin so: the model is inside a LoraModel inside a PeftModel.
_PREFIX = "base_model.model."


def peft_options(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of an adapter that PEFT, or :func:`save_peft`, saved in a folder.

    For ``registry.resolve(["lora"], options={"lora": peft_options(folder)})``; then :func:`load_peft`.

    Raises:
        CheckpointError: there is no readable ``adapter_config.json``, or it asks for what the plugin cannot do.
    """
    return read_config(Path(folder))


def save_peft(handle: tx.Handle, folder: str | os.PathLike[str], adapter: str = "default") -> None:
    """Write an adapter for ``peft.PeftModel.from_pretrained(model, folder)``.

    Call it on every rank: where parameters are sharded, only the adapter is gathered. The first rank writes;
    the folder is made if need be, and each file appears when it is complete.

    Args:
        handle: of a model that the plugin ``lora`` transforms.
        folder: where the two files go.
        adapter: the adapter's name in the model. Files do not hold it.

    Raises:
        CheckpointError: there is no such adapter, or PEFT cannot have it.
        OSError: a file cannot be written.
    """
    lora = _plugin(handle)
    keys = _file_keys(lora, adapter)
    state = handle.state_dict(kind="adapter")
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    tensors = {key: state[name].contiguous().clone() for key, name in keys.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    unfinished = Path(folder) / f".{os.getpid()}.tmp"
    try:
        save_file(tensors, unfinished, {"format": "pt"})
        unfinished.replace(Path(folder) / WEIGHTS_FILE)
        write_config(unfinished, lora.adapter(adapter).options, lora.adapter(adapter).modules)
        unfinished.replace(Path(folder) / CONFIG_FILE)
    finally:
        unfinished.unlink(missing_ok=True)


def load_peft(handle: tx.Handle, folder: str | os.PathLike[str], adapter: str = "default") -> None:
    """Read an adapter that PEFT, or :func:`save_peft`, saved.

    Call it on every rank. Everything is checked first; nothing is half-loaded.

    Args:
        handle: of a model that the plugin ``lora`` transforms, under :func:`peft_options` of the folder.
        folder: where the two files are.
        adapter: the name in the model of the adapter that takes the values.

    Raises:
        CheckpointError: a file cannot be read; adapters are scaled otherwise than in the model; keys or shapes differ;
            there are weights of the model in it, and they differ.
        ParallelError: so it is on another rank.
    """
    lora = _plugin(handle)
    with tx.parallel.together(_groups(handle), "load_peft"):
        _check_config(lora.adapter(adapter), Path(folder))
        keys = _file_keys(lora, adapter)
        given = _without_base(_read(Path(folder)), keys, lora, Path(folder))
        _check_keys(given, keys, Path(folder))
        state = _by_name(given, keys, Path(folder))
    handle.load_state_dict(state, kind="adapter", strict=False)


def _plugin(handle: tx.Handle) -> LoRA:
    lora: LoRA = handle.plugin("lora")
    return lora


def _groups(handle: tx.Handle) -> list[Any]:
    return [group for name in handle.pipeline for group in handle.plugin(name).process_groups()]


def _file_keys(lora: LoRA, adapter: str) -> dict[str, str]:
    """Names of the adapter's tensors in the model, by their keys in a file."""
    if "" in lora.adapter(adapter).modules:
        raise CheckpointError(
            "The model is itself a layer with an adapter; PEFT has adapters only on layers inside a model.",
            "Put the layer into a torch.nn.Sequential, or save with thunder_xform.checkpoint.save_adapter.",
        )
    return {f"{_PREFIX}{key}": name for key, name in lora.adapter(adapter).file_keys.items()}


def _check_config(adapter: Adapter, folder: Path) -> None:
    """Refuse an adapter that computes something else from the same tensors."""
    saved = Options(**read_config(folder))
    theirs, ours = saved.init_lora_weights, adapter.options.init_lora_weights
    if theirs != ours and "pissa" in (theirs, ours):
        raise CheckpointError(
            f"{folder} holds an adapter with init_lora_weights={theirs!r}, but the model has {ours!r}: they go with "
            f"different weights of the model.",
            "Resolve the pipeline under the options that peft_options(folder) returns.",
            path=str(folder),
        )
    for path in adapter.modules:
        factors = saved.scaling_of(path), adapter.options.scaling_of(path)
        if factors[0] != factors[1]:
            raise CheckpointError(
                f"{folder} holds an adapter that scales {path!r} by {factors[0]:g}, but the model scales by "
                f"{factors[1]:g}.",
                "Resolve the pipeline under the options that peft_options(folder) returns.",
                path=str(folder),
            )


def _read(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.exists() and (folder / _OLD_WEIGHTS_FILE).exists():
        path = folder / _OLD_WEIGHTS_FILE
    try:
        if path.suffix == ".bin":
            state: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
            return state
        return load_file(path)
    except pickle.UnpicklingError as error:
        # torch's message goes on to explain how to run what is in there.
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors.", "Save as safetensors.", path=str(path)
        ) from error
    except (OSError, RuntimeError, EOFError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}).", "Check that the file is there and complete.", path=str(path)
        ) from error


def _without_base(
    given: Mapping[str, torch.Tensor], keys: Collection[str], lora: LoRA, folder: Path
) -> dict[str, torch.Tensor]:
    """What a file holds without weights of the model, which PEFT adds where an embedding has an adapter.

    Refuses other values than the model's: nothing would read them.
    """
    kept = dict(given)
    for key in given.keys() - set(keys):
        own = lora.base_tensor(key.removeprefix(_PREFIX).replace(".base_layer.", "."))
        if own is None:
            continue
        value = kept.pop(key)
        if own.is_meta or not torch.equal(value.to(own), own):
            raise CheckpointError(
                f"The adapter in {folder} brings the model's own {key!r}, "
                f"{'which cannot be compared: the model holds no data' if own.is_meta else 'with other values'}.",
                "Load that into the model first, or save the adapter with save_embedding_layers=False.",
                key=key,
            )
    return kept


def _check_keys(given: Collection[str], keys: Collection[str], folder: Path) -> None:
    missing, unexpected = (tuple(sorted(set(a) - set(b))) for a, b in ((keys, given), (given, keys)))
    if missing or unexpected:
        lacks = f"lacks {_listed(missing)}" if missing else ""
        has = f"has {_listed(unexpected)}, which the model does not" if unexpected else ""
        raise CheckpointError(
            f"The adapter in {folder} {' and '.join(filter(None, (lacks, has)))}.",
            "Resolve the pipeline under the options that peft_options(folder) returns, for the same base model.",
            missing=missing,
            unexpected=unexpected,
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


def _by_name(given: Mapping[str, torch.Tensor], keys: Mapping[str, str], folder: Path) -> dict[str, torch.Tensor]:
    """The tensors by their names in the model, where tied layers have one adapter."""
    state: dict[str, torch.Tensor] = {}
    for key, name in keys.items():
        if not torch.equal(state.setdefault(name, given[key]), given[key]):
            first = next(other for other, its_name in keys.items() if its_name == name)
            raise CheckpointError(
                f"The adapter in {folder} has different tensors for {first!r} and {key!r}, but the layers share a "
                f"weight and one adapter here.",
                "Untie the layers in the model.",
                keys=(first, key),
            )
    return state
