"""Adapters in PEFT's files: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors.torch import save_file

import thunder_xform as tx
from thunder_xform.errors import CheckpointError
from thunder_xform_lora._config import CONFIG_FILE, read_config, write_config
from thunder_xform_lora._contents import PREFIX, WEIGHTS_FILE, by_name, check_keys, read_weights, without_base
from thunder_xform_lora.options import Options

if TYPE_CHECKING:
    from thunder_xform_lora._adapter import Adapter
    from thunder_xform_lora.plugin import LoRA


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
        given = without_base(read_weights(Path(folder)), keys, lora.base_tensor, Path(folder))
        check_keys(given, keys, Path(folder))
        state = by_name(given, keys, Path(folder))
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
    return {f"{PREFIX}{key}": name for key, name in lora.adapter(adapter).file_keys.items()}


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
