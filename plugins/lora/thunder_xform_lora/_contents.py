"""What is in the file of PEFT that holds the tensors of an adapter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from thunder_xform.errors import CheckpointError

WEIGHTS_FILE = "adapter_model.safetensors"
_OLD_WEIGHTS_FILE = "adapter_model.bin"
#: PEFT's names of parameters begin so: the model is inside a LoraModel inside a PeftModel.
PREFIX = "base_model.model."


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the adapter in a folder, by PEFT's keys."""
    path = folder / WEIGHTS_FILE
    if not path.exists() and (folder / _OLD_WEIGHTS_FILE).exists():
        path = folder / _OLD_WEIGHTS_FILE
    try:
        if path.suffix != ".bin":
            return load_file(path)
        state: object = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}).", "Check that the file is there and complete.", path=str(path)
        ) from error
    except Exception as error:  # A damaged pickle raises anything; torch's message explains how to run what is in it.
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors.", "Save as safetensors.", path=str(path)
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(
            f"{path} holds something else than tensors by name.", "Save it with PEFT.", path=str(path)
        )
    return state


def without_base(
    given: Mapping[str, torch.Tensor],
    keys: Collection[str],
    base: Callable[[str], torch.Tensor | None],
    folder: Path,
) -> dict[str, torch.Tensor]:
    """What a file holds without weights of the model, which PEFT adds where an embedding has an adapter.

    Refuses other values than those of ``base``, which gives the model's own tensors by name: nothing would read them.
    """
    kept = dict(given)
    for key in sorted(given.keys() - set(keys)):
        own = base(key.removeprefix(PREFIX).replace(".base_layer.", "."))
        if own is None:
            continue
        value = kept.pop(key)
        if own.is_meta or value.shape != own.shape or not torch.equal(value.to(own), own):
            raise CheckpointError(
                f"The adapter in {folder} brings the model's own {key!r}, "
                f"{'which cannot be compared: the model holds no data' if own.is_meta else 'with other values'}.",
                "Load that into the model first, or save the adapter with save_embedding_layers=False.",
                key=key,
            )
    return kept


def check_keys(given: Collection[str], keys: Collection[str], folder: Path) -> None:
    """Refuse keys other than those of the model's adapter."""
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


def by_name(given: Mapping[str, torch.Tensor], keys: Mapping[str, str], folder: Path) -> dict[str, torch.Tensor]:
    """The tensors by their names in the model, where tied layers have one adapter."""
    state: dict[str, torch.Tensor] = {}
    for key, name in keys.items():
        first_value, value = state.setdefault(name, given[key]), given[key]
        if first_value.dtype != value.dtype or not torch.equal(first_value, value):
            first = next(other for other, its_name in keys.items() if its_name == name)
            raise CheckpointError(
                f"The adapter in {folder} has different tensors for {first!r} and {key!r}, but the layers share a "
                f"weight and one adapter here.",
                "Untie the layers in the model.",
                keys=(first, key),
            )
    return state
