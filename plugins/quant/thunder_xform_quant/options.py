"""Options of the ``quant`` plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from thunder_xform.patterns import normalized

#: The value of ``target_modules`` that stands for every linear layer but a language model's output layer.
ALL_LINEAR = "all-linear"
#: Layers left alone by default, whether the model has them or not: the usual name of an output layer.
SKIPPED = ("lm_head",)

Dtype = Literal["float32", "float16", "bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which linear layers are held in few bits, and how."""

    scheme: str = "nf4"
    """"nf4" or "fp4" (4 bits, bitsandbytes), "int8" (PyTorch alone), a scheme that another plugin of the pipeline
    offers, or "module:Class"."""
    blocksize: Annotated[int, ">= 1"] | None = None
    """Entries of a row that share one scale in nf4 and fp4: 32, 64, ..., 4096; the scheme's default, 64, if None."""
    double_quant: bool | None = None
    """Whether nf4 and fp4 hold the scales, too, in 8 bits; the scheme's default, not to, if None."""
    compute_dtype: Dtype | None = None
    """Dtype in which layers multiply, for example "bfloat16"; that of their input if None."""
    target_modules: str | Sequence[str] = ALL_LINEAR
    """Names of layers, full or dotted suffixes, or a regular expression for full names, or "all-linear"."""
    exclude_modules: str | Sequence[str] | None = SKIPPED
    """Names, full or as dotted suffixes, or a regular expression: what matches is left as it is."""
    release_originals: bool = False
    """Free the storage of the user's module (what was replaced there moves to the meta device)."""

    def __post_init__(self) -> None:
        if not self.scheme:
            raise ValueError("`scheme` is empty; name one, such as 'nf4' or 'int8'")
        if self.compute_dtype not in (None, *get_args(Dtype)):
            raise ValueError(f"`compute_dtype` is {self.compute_dtype!r}; it is one of {', '.join(get_args(Dtype))}")
        object.__setattr__(self, "target_modules", normalized("target_modules", self.target_modules))
        if self.exclude_modules is not None:
            object.__setattr__(self, "exclude_modules", normalized("exclude_modules", self.exclude_modules))
        if not self.target_modules:
            raise ValueError(f"`target_modules` is empty; name layers or write {ALL_LINEAR!r}")
