"""``adapter_config.json``, the file in which PEFT keeps the options of an adapter."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thunder_xform.errors import CheckpointError
from thunder_xform_lora.options import ALL_LINEAR, Options

CONFIG_FILE = "adapter_config.json"

#: Fields that say nothing about what an adapter computes.
_IGNORED = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "fan_in_fan_out",  # PEFT sets it by the type of each layer
        "inference_mode",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    ]
)


def _known() -> frozenset[str]:
    """Options that PEFT has; names of adapters are not in files."""
    return frozenset(field.name for field in dataclasses.fields(Options)) - {"adapters"}


def read_config(folder: Path) -> dict[str, Any]:
    """The options of the adapter that PEFT, or :func:`write_config`, saved in a folder.

    Raises:
        CheckpointError: there is no readable configuration, or it asks for what this plugin cannot do.
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}).",
            "Pass the folder that PEFT's save_pretrained wrote.",
            path=str(path),
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(
            f"{path} describes an adapter of the type {kind!r} and not 'LORA'.",
            "Pass a LoRA adapter.",
            path=str(path),
        )
    unknown = sorted(name for name in config.keys() - _known() - _IGNORED if _asks(config[name]))
    if unknown:
        told = ", ".join(f"{name}={config[name]!r}" for name in unknown)
        raise CheckpointError(
            f"{path} asks for {told}, which the plugin 'lora' does not support.",
            "Use PEFT for this adapter, or train one without.",
            path=str(path),
            fields=tuple(unknown),
        )
    if not config.get("target_modules"):
        raise CheckpointError(
            f"{path} names no `target_modules`.",
            "Save the adapter with PEFT once more: it fills them in.",
            path=str(path),
        )
    options = {name: config[name] for name in config if name in _known()}
    if isinstance(init := options.get("init_lora_weights"), str) and init not in ("gaussian", "pissa"):
        raise CheckpointError(
            f"{path} says init_lora_weights={init!r}, and such adapters may go with another "
            f"base model than the plain one.",
            "Convert the adapter with PEFT (path_initial_model_for_weight_conversion).",
            path=str(path),
            fields=("init_lora_weights",),
        )
    try:
        Options(**options)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path} holds options that no adapter has: {error}.",
            "The file is damaged or was edited; save the adapter with PEFT once more.",
            path=str(path),
        ) from error
    return options


def _asks(value: object) -> bool:
    """Whether the value of a field asks for anything; PEFT writes all of them."""
    return value not in (None, False) and value not in ({}, [], "")


def write_config(path: Path, options: Options, modules: Sequence[str]) -> None:
    """Write what PEFT needs to build the same adapters.

    Args:
        path: the file.
        options: of the adapters.
        modules: names of the layers that have one.
    """
    values = {field: getattr(options, field) for field in sorted(_known())}
    if isinstance(options.target_modules, str) and options.target_modules.lower() == ALL_LINEAR:
        # What PEFT takes for an output layer depends on the class of the model.
        values |= {"target_modules": list(modules), "exclude_modules": None}
    values |= {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    # Unsorted: of the keys of a pattern the first one that fits counts.
    path.write_text(json.dumps(values, indent=2), "utf-8")
