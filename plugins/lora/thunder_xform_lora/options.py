"""Options of the ``lora`` plugin, under the names of PEFT's ``LoraConfig``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: The value of ``target_modules`` that stands for every linear layer but a language model's output layer.
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which linear layers get an adapter, and how large it is.

    An adapter changes ``y = x @ W.T + bias`` to ``y + dropout(x) @ A.T @ B.T * (lora_alpha / r)``, with A of
    shape (r, in_features) and B of shape (out_features, r).

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
    """

    r: int = 8
    """Rank of the adapters: at least 1, at most the smaller side of every layer that gets one."""
    lora_alpha: float = 8.0
    """Numerator of the scaling lora_alpha / r of the adapters' output; positive."""
    lora_dropout: float = 0.0
    """Probability, from 0 up to but without 1, of zeroing an entry of an adapter's input in training mode."""
    target_modules: str | Sequence[str] = ALL_LINEAR
    """Names of layers, full or dotted suffixes, or a regular expression for full names, or 'all-linear'."""
    exclude_modules: str | Sequence[str] | None = None
    """Names, full or as dotted suffixes, or a regular expression: what matches gets no adapter."""

    def __post_init__(self) -> None:
        if not _is_number(self.r) or self.r != int(self.r) or self.r < 1:
            raise ValueError(f"`r` is {self.r!r}, but a rank is a whole number of at least 1")
        if not _is_number(self.lora_alpha) or self.lora_alpha <= 0:
            raise ValueError(f"`lora_alpha` is {self.lora_alpha!r}, but a scaling must be positive")
        if not _is_number(self.lora_dropout) or not 0 <= self.lora_dropout < 1:
            raise ValueError(f"`lora_dropout` is {self.lora_dropout!r}, but a probability is wanted, below 1")
        if self.exclude_modules is not None:
            object.__setattr__(self, "exclude_modules", _pattern("exclude_modules", self.exclude_modules))
        object.__setattr__(self, "target_modules", _pattern("target_modules", self.target_modules))
        if not self.target_modules:
            raise ValueError(f"`target_modules` is empty; name layers or write {ALL_LINEAR!r}")

    def rank_of(self, path: str) -> int:
        """Rank of the adapter of the layer of that name."""
        return self.r

    def scaling_of(self, path: str) -> float:
        """Factor of the output of that layer's adapter."""
        return self.lora_alpha / self.rank_of(path)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _pattern(option: str, value: str | Sequence[str]) -> str | tuple[str, ...]:
    """A regular expression as it is, names as a tuple."""
    if not isinstance(value, str):
        names = tuple(value)
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"`{option}` is {value!r}, but it is a regular expression or a list of names")
        return names
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"`{option}` is {value!r}, which as text is a regular expression, but not a valid one ({error}); "
            f"write a list for names"
        ) from None
    return value
