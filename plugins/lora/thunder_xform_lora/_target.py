"""One weight with an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import thunder_xform as tx
from thunder_xform_lora._layer import Layer
from thunder_xform_lora.options import Options

_MAGNITUDE = "lora_magnitude_vector.{}.weight"


@dataclass(frozen=True, slots=True)
class Target:
    """One weight that gets an adapter where one kind of layer applies it.

    Attributes:
        adapter: the adapter's name.
        options: of the adapter.
        weight: the weight's name in the parameter ledger.
        modules: names of all layers of the kind that use it, several where such are tied; the first names the adapter.
        layer: the first of them.
        r: rank of the adapter.
        scaling: factor of the adapter's output.
    """

    adapter: str
    options: Options
    weight: str
    modules: tuple[str, ...]
    layer: Layer
    r: int
    scaling: float

    @property
    def key(self) -> tuple[type[Layer], str]:
        """What tells calls that the adapter belongs to, see :func:`thunder_xform_lora._kinds.applied`."""
        return type(self.layer), self.weight

    @property
    def decomposed(self) -> bool:
        """Whether the adapter starts as the principal part of the weight."""
        return self.layer.linear and self.options.init_lora_weights == "pissa"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of A and B as in a PEFT model, such as ``<module>.lora_A.<adapter>.weight``.

        Under DoRA there is a third, of the lengths of rows.
        """
        return self.names_in(self.modules[0])

    def names_in(self, module: str) -> tuple[str, ...]:
        """The names that the same tensors have in one of the tied layers."""
        return tuple(f"{module}.{part.format(self.adapter)}".removeprefix(".") for part in self._parts)

    @property
    def file_keys(self) -> dict[str, str]:
        """Names of the tensors by what PEFT calls them in files: without the adapter's, for every tied layer."""
        endings = [part.replace(".{}", "") for part in self.layer.parts]
        endings += ["lora_magnitude_vector"] * self.options.use_dora
        keys = [f"{module}.{ending}" for module in self.modules for ending in endings]
        return dict(zip(keys, self.names * len(self.modules), strict=True))

    @property
    def _parts(self) -> tuple[str, ...]:
        return (*self.layer.parts, _MAGNITUDE) if self.options.use_dora else self.layer.parts


def other_owners(weight: str, paths: Sequence[str], params: tx.Parameters | tx.Context) -> Iterator[str]:
    """Modules that have a weight, without those of the given names."""
    owners = (name.rpartition(".")[0] for name in params.aliases(weight))
    return (path for path in owners if path not in paths)


def tied_elsewhere(target: Target, ctx: tx.Context) -> tuple[str, ...]:
    """Modules that share the weight without its adapter, such as a tied embedding."""
    return tuple(other_owners(target.weight, target.modules, ctx))
