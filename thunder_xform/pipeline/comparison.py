"""Do two outcomes of one call agree?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thunder_xform.host.eager import Outcome

#: Kinds of deviations that do not depend on other ranks' data.
FORWARD = ("output", "buffer")
#: Largest difference allowed, relative to the largest magnitude in the tensor, by the coarsest dtype that takes part.
TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
#: A gradient counts as at least this much of the largest gradient: noise around an exact zero is none.
_FLOOR = 1e-2


@dataclass(frozen=True)
class Deviation:
    """The first value that departs.

    Attributes:
        kind: ``"output"``, ``"buffer"``, ``"input gradient"`` or ``"gradient"``.
        name: number of an output or input, name of a parameter or buffer.
        detail: how it differs, as a phrase.
    """

    kind: str
    name: str
    detail: str

    def __str__(self) -> str:
        name = self.name if self.name.isdecimal() else repr(self.name)
        return f"{self.kind} {'of ' if self.kind == 'gradient' else ''}{name} {self.detail}"


def coarsest(tensors: Iterable[Any]) -> float:
    """The tolerance for numbers that were computed from ``tensors``."""
    dtypes = {t.dtype for t in tensors if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())}
    dtypes |= {torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
    real = [torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype for dtype in dtypes]
    return max((TOLERANCE.get(dtype, 5e-2) for dtype in real), default=0.0)


def forward_deviations(ours: Outcome, eager: Outcome, tolerance: float) -> Iterator[Deviation]:
    """Where outputs and buffers differ, in order."""
    if ours.form != eager.form:
        yield Deviation("output", "structure", f"is {ours.form} instead of {eager.form}")
        return
    for number, (found, wanted) in enumerate(zip(ours.outputs, eager.outputs, strict=True)):
        if detail := difference(found, wanted, tolerance):
            yield Deviation("output", str(number), detail)
    for name, buffer in ours.buffers.items():
        if name in eager.buffers and (detail := difference(buffer, eager.buffers[name], tolerance)):
            yield Deviation("buffer", name, detail)


def backward_deviations(
    ours: Mapping[str, torch.Tensor | None], wanted: Mapping[str, torch.Tensor | None], tolerance: float, kind: str
) -> Iterator[Deviation]:
    """Where gradients differ; that of the parameter used last comes first in a backward, so in reverse order."""
    largest = max((_largest(g) for g in wanted.values() if g is not None), default=0.0)
    for name in reversed(list(wanted)):
        found, expected = ours.get(name), wanted[name]
        if found is None and expected is None:
            continue
        zero = torch.zeros_like(expected if found is None else found)  # type: ignore[arg-type]
        found, expected = zero if found is None else found, zero if expected is None else expected
        if detail := difference(found, expected, tolerance, _FLOOR * largest):
            detail = "is missing" if ours.get(name) is None else detail
            yield Deviation(kind, name, detail)


def difference(found: Any, wanted: Any, tolerance: float, scale: float = 0.0) -> str:
    """How two values differ, as the rest of a sentence; empty if they agree.

    Args:
        found, wanted: two values.
        tolerance: largest difference of floating numbers, relative to the largest magnitude.
        scale: what the largest magnitude counts as at least.
    """
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        same = type(found) is type(wanted) and bool(found == wanted)
        return "" if same else f"is {_short(found)} instead of {_short(wanted)}"
    if found.shape != wanted.shape:
        return f"has the shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.is_floating_point() and not wanted.is_complex():
        if found.dtype != wanted.dtype:
            return f"is {found.dtype} instead of {wanted.dtype}"
        count = int((found != wanted).sum())
        return f"differs in {count} of {wanted.numel()} elements" if count else ""
    wide = torch.complex128 if found.is_complex() or wanted.is_complex() else torch.float64
    ours, theirs = found.detach().to(wide), wanted.detach().to(found.device, wide)
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    error = (ours - theirs).masked_fill(equal, 0).abs()
    if not error.numel():
        return ""
    allowed = tolerance * max(_largest(theirs), scale)
    # Written so that a NaN is an error.
    if bool((error <= allowed).all()):
        return ""
    worst = float(error.max())
    return f"differs by up to {worst:.3g} (allowed {allowed:.3g})"


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor.detach()[tensor.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _short(value: Any) -> str:
    text = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
