"""Laws that state dicts of transformed models obey."""

from __future__ import annotations

from typing import Any

import torch

from thunder_xform.pipeline import handle


def assert_state_laws(compiled: Any, plain: torch.nn.Module, *, reduced: bool = False, atol: float = 0.0) -> None:
    """Check the full state of a transformed model against the plain model's.

    - It has the plain model's keys, shapes and dtypes, and loads into the plain model, strictly.
    - Importing what was exported changes nothing that is exported: ``import(export(x)) == x``.
    - Importing brings back what was exported, whatever happened to the model in between.
    - Refused is a state with a missing or an unknown key, and then the model stays as it is.

    Args:
        compiled: the transformed model; a collective if its plugins' exports are.
        plain: a plain model of the same architecture; takes on the exported values.
        reduced: exported values may have other dtypes than the plain model's (quantized weights).
        atol: tolerance of the second and third law, for lossy encodings.

    Raises:
        AssertionError: naming the law and the key.
    """
    grip = handle(compiled)
    exported = {key: tensor.clone() for key, tensor in grip.state_dict().items()}
    wanted = plain.state_dict()
    assert exported.keys() == wanted.keys(), f"Keys that differ: {sorted(exported.keys() ^ wanted.keys())}."
    for key, tensor in wanted.items():
        found = exported[key]
        assert found.shape == tensor.shape, f"{key!r} is exported as {tuple(found.shape)}, not {tuple(tensor.shape)}."
        assert reduced or found.dtype == tensor.dtype, f"{key!r} is exported as {found.dtype}, not {tensor.dtype}."
    plain.load_state_dict(exported, strict=True)

    grip.load_state_dict(exported)
    _same(grip.state_dict(), exported, "importing what was exported changed", atol)
    with torch.no_grad():
        for parameter in grip.parameters.values():
            if parameter.is_floating_point():
                parameter.add_(1.0)
    grip.load_state_dict(exported)
    _same(grip.state_dict(), exported, "importing did not bring back", atol)

    first = next(iter(exported))
    for bad in ({key: t for key, t in exported.items() if key != first}, {**exported, "no.such.key": exported[first]}):
        other = {key: tensor + 1 if tensor.is_floating_point() else tensor for key, tensor in bad.items()}
        try:
            grip.load_state_dict(other)
        except Exception:
            _same(grip.state_dict(), exported, "a refused state changed", atol)
        else:
            raise AssertionError(
                f"A state with other keys than the model's was loaded: {sorted(other.keys() ^ wanted.keys())}."
            )


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str, atol: float) -> None:
    assert found.keys() == wanted.keys(), f"{what} the keys {sorted(found.keys() ^ wanted.keys())}"
    for key, tensor in wanted.items():
        equal = torch.equal(found[key], tensor) if atol == 0 else torch.allclose(found[key], tensor, rtol=0, atol=atol)
        assert equal, f"{what} {key!r}"
