"""Options of the ``lora`` plugin, under the names of PEFT's ``LoraConfig``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from thunder_xform.patterns import normalized

#: The value of ``target_modules`` that stands for every linear layer but a language model's output layer.
ALL_LINEAR = "all-linear"
#: The name of the first adapter, as in PEFT.
DEFAULT = "default"

Rank = Annotated[int, ">= 1"]
Scaling = Annotated[float, "> 0, < inf"]

_CHOICES: dict[str, tuple[bool | str, ...]] = {
    "bias": ("none", "all", "lora_only"),
    "init_lora_weights": (True, False, "gaussian", "pissa"),
    "use_dora": (True, False),
    "use_rslora": (True, False),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which layers get an adapter, and how large it is.

    An adapter changes ``y = x @ W.T + bias`` to ``y + dropout(x) @ A.T @ B.T * scaling``, with A of shape
    (r, in_features), B of shape (out_features, r), and the scaling lora_alpha / r. Embeddings and convolutions have
    adapters of the same kind, as in PEFT.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
    """

    r: Rank = 8
    """Rank of the adapters: at least 1; under "pissa" at most the smaller side of every layer that gets one."""
    lora_alpha: Scaling = 8.0
    """Numerator of the scaling lora_alpha / r of the adapters' output; positive."""
    lora_dropout: Annotated[float, ">= 0, < 1"] = 0.0
    """Probability, from 0 up to but without 1, of zeroing an entry of an adapter's input in training mode."""
    target_modules: str | Sequence[str] = ALL_LINEAR
    """Names of layers, full or dotted suffixes, or a regular expression for full names, or 'all-linear'."""
    exclude_modules: str | Sequence[str] | None = None
    """Names, full or as dotted suffixes, or a regular expression: what matches gets no adapter."""

    rank_pattern: Mapping[str, Rank] = field(default_factory=dict)
    """Other ranks for some layers, by name, dotted suffix or regular expression for one; the first that fits counts."""
    alpha_pattern: Mapping[str, Scaling] = field(default_factory=dict)
    """Other values of lora_alpha for some layers, in the same way."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead. Source: Kalajdzievski, "A Rank Stabilization Scaling Factor", 2023."""
    use_dora: bool = False
    """Learn the lengths of a weight's rows apart from their direction. Source: Liu et al., "DoRA", ICML 2024."""
    layers_to_transform: int | Sequence[int] | None = None
    """Indices of the layers of a stack to keep to; `target_modules` is a list of names then."""
    layers_pattern: str | Sequence[str] | None = None
    """Name of that stack, or several, such as "layers"; the first one with an index in a layer's name if None."""
    init_lora_weights: bool | Literal["gaussian", "pissa"] = True
    """True: adapters start as zero. "gaussian": too, with A normal instead of uniform. False: at random. "pissa": as
    the principal part of a linear layer's weight, which the model then has without it."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases train, too: none, all of the model's, or those of layers with adapters."""
    modules_to_save: Sequence[str] | None = None
    """Endings of the names of modules that train and are saved whole, with the adapters, such as a new head."""
    adapters: Sequence[str] | Mapping[str, Mapping[str, Any]] = (DEFAULT,)
    """Names of the adapters that the model holds, all of these options; or for each name what it has otherwise. The
    first is active until another is chosen."""

    def __post_init__(self) -> None:
        if not _is_rank(self.r):
            raise ValueError(f"`r` is {self.r!r}, but a rank is a whole number of at least 1")
        if not _is_scaling(self.lora_alpha):
            raise ValueError(f"`lora_alpha` is {self.lora_alpha!r}, but a scaling must be positive")
        if not _is_number(self.lora_dropout) or not 0 <= self.lora_dropout < 1:
            raise ValueError(f"`lora_dropout` is {self.lora_dropout!r}, but a probability is wanted, below 1")
        for option, accepts, wanted in (
            ("rank_pattern", _is_rank, "ranks are whole numbers of at least 1"),
            ("alpha_pattern", _is_scaling, "a scaling must be positive"),
        ):
            for pattern, value in getattr(self, option).items():
                _check_expression(option, pattern)
                if not accepts(value):
                    raise ValueError(f"`{option}` has {value!r} for {pattern!r}, but {wanted}")
        if self.exclude_modules is not None:
            object.__setattr__(self, "exclude_modules", normalized("exclude_modules", self.exclude_modules))
        object.__setattr__(self, "target_modules", normalized("target_modules", self.target_modules))
        if not self.target_modules:
            raise ValueError(f"`target_modules` is empty; name layers or write {ALL_LINEAR!r}")
        for option, choices in _CHOICES.items():
            # Registries check what they are given, but not what is inside of `adapters`.
            if not any(type(getattr(self, option)) is type(c) and getattr(self, option) == c for c in choices):
                told = " or ".join(map(repr, choices))
                raise ValueError(f"`{option}` is {getattr(self, option)!r}, but it is {told}")
        self._check_layers()
        self._check_adapters()

    def _check_adapters(self) -> None:
        names = tuple(self.adapters)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"`adapters` is {names!r}, but one name is needed at least, and none twice")
        if odd := [name for name in names if not name or "." in name]:
            raise ValueError(f"`adapters` has {odd[0]!r}, but names of adapters are not empty and have no dots")
        known = {field.name for field in fields(self)} - {"adapters"}
        own = self.adapters if isinstance(self.adapters, Mapping) else {}
        for name, options in own.items():
            if unknown := [option for option in options if option not in known]:
                near = difflib.get_close_matches(unknown[0], known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"`adapters` gives {name!r} the option {unknown[0]!r}, which there is not{hint}")
            try:
                replace(self, adapters=(name,), **options)
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"of the options that `adapters` gives {name!r}, {error}") from None
        object.__setattr__(self, "adapters", {name: dict(own[name]) for name in own} or names)
        if len(names) > 1 and any(each.init_lora_weights == "pissa" for each in self.each.values()):
            raise ValueError(f"`adapters` is {names!r}, but with init_lora_weights='pissa' there can be one only")

    @property
    def each(self) -> dict[str, Options]:
        """The options of each adapter by its name."""
        own = self.adapters if isinstance(self.adapters, Mapping) else {name: {} for name in self.adapters}
        return {name: replace(self, adapters=(name,), **options) for name, options in own.items()}

    def _check_layers(self) -> None:
        if self.layers_to_transform is None:
            if self.layers_pattern:
                raise ValueError(f"`layers_pattern` is {self.layers_pattern!r}, but `layers_to_transform` is not given")
        elif isinstance(self.target_modules, str):
            raise ValueError(
                f"`layers_to_transform` goes with a list of names, but `target_modules` is {self.target_modules!r}"
            )
        for pattern in self.layer_patterns:
            _check_expression("layers_pattern", pattern)

    @property
    def layer_patterns(self) -> tuple[str, ...]:
        """``layers_pattern`` as a tuple."""
        return (self.layers_pattern,) if isinstance(self.layers_pattern, str) else tuple(self.layers_pattern or ())

    @property
    def layer_indices(self) -> frozenset[int] | None:
        """``layers_to_transform`` as a set; None for all layers. PEFT takes an empty list for all, too."""
        if isinstance(self.layers_to_transform, int):
            return frozenset([self.layers_to_transform])
        return frozenset(self.layers_to_transform or ()) or None

    def rank_of(self, path: str) -> int:
        """Rank of the adapter of the layer of that name."""
        return self.rank_pattern.get(_fitting(self.rank_pattern, path), self.r)

    def scaling_of(self, path: str) -> float:
        """Factor of the output of that layer's adapter."""
        alpha = self.alpha_pattern.get(_fitting(self.alpha_pattern, path), self.lora_alpha)
        rank = self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _fitting(patterns: Mapping[str, object], path: str) -> str:
    """The first pattern that fits the end of a name; the name itself if none does."""
    return next((pattern for pattern in patterns if fits(pattern, path)), path)


def fits(pattern: str, path: str) -> bool:
    """Whether a key of ``rank_pattern`` or ``alpha_pattern`` is for the layer of that name."""
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_scaling(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and value > 0


def _check_expression(option: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`{option}` has {pattern!r}, which is no valid regular expression ({error})") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
