"""What the ledger records of one parameter or buffer after one plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from thunder_xform.host.placement import Placed


@dataclass(frozen=True, slots=True)
class Version:
    """One parameter or buffer as it stands after one plugin.

    Attributes:
        name: dotted name; for tied tensors the first name in module order.
        kind: parameter or buffer.
        shape: logical shape, the one the model's operators are written for.
        stored_shape: shape of the tensor that is really held (a shard, a packed weight).
        dtype: dtype of the stored tensor.
        device: device of the stored tensor.
        requires_grad: whether it trains.
        layout: ``"dense"``, or how the stored tensor encodes the logical one, in the words of whoever changed it.
        owner: plugin that wrote this version, ``"model"`` for the original.
        origin: plugin that added the tensor, ``"model"`` if the user's module has it.
        decode: gives the logical value where the layout is another than ``"dense"``, if whoever wrote it can.
        placed: the ranks that hold other parts or copies of the stored tensor, in the order in which it was cut.
        whole_shape: shape of the stored tensor before it was cut.
        whole_layout: layout of the stored tensor before it was cut.
    """

    name: str
    kind: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: str
    owner: str
    origin: str
    decode: Callable[[], torch.Tensor] | None = field(default=None, compare=False, repr=False)
    placed: tuple[Placed, ...] = field(default=(), compare=False, repr=False)
    whole_shape: tuple[int, ...] = field(default=(), compare=False, repr=False)
    whole_layout: str = field(default="dense", compare=False, repr=False)
