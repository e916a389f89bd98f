"""What a plugin sees of the ledger in ``update_model_state``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from thunder_xform.errors import PipelineError
from thunder_xform.host.ledger import Ledger
from thunder_xform.host.placement import Placed
from thunder_xform.host.version import Version


class Parameters:
    """The model's parameters and buffers, for one plugin to read and to change.

    Iterating gives the names of parameters, tied ones once, in module order; :attr:`buffers` the names of buffers.
    Every change is recorded under the plugin's name, and from that record prologue, guards and computation inputs are
    derived. The user's module keeps its own tensors.
    """

    def __init__(self, ledger: Ledger, stage: int, plugin: str) -> None:
        self._ledger = ledger
        self._stage = stage
        self._plugin = plugin

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._ledger) if self._ledger.latest(name).kind == "parameter")

    def __contains__(self, name: object) -> bool:
        return name in self._ledger

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of all buffers, shared ones once."""
        return tuple(name for name in self._ledger if self._ledger.latest(name).kind == "buffer")

    def version(self, name: str) -> Version:
        """Shape, dtype, layout, owner of a parameter or buffer as it stands now."""
        return self._ledger.latest(name)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor that the compiled model reads now."""
        return self._ledger.tensor(name)

    def value(self, name: str) -> torch.Tensor:
        """The logical value: what the stored tensor encodes; the stored tensor itself where its layout is ``"dense"``.

        Raises:
            PipelineError: the plugin that chose the layout did not say how to decode it.
        """
        return self._ledger.value(name)

    def aliases(self, name: str) -> tuple[str, ...]:
        """All names of a tied tensor; the first is the one it is recorded under."""
        return self._ledger.aliases(name)

    def canonical(self, name: str) -> str:
        """The name a tied tensor is recorded under."""
        return self._ledger.canonical(name)

    def original(self, name: str) -> torch.Tensor | None:
        """The user's module's own tensor; None if a plugin added this one."""
        return self._ledger.original(name)

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        requires_grad: bool = True,
        kind: Literal["parameter", "buffer"] = "parameter",
        aliases: Iterable[str] = (),
        shape: tuple[int, ...] | None = None,
        layout: str = "dense",
    ) -> None:
        """Add a parameter or buffer that the user's module does not have.

        Args:
            name: dotted name, new to the model.
            tensor: its value; used as it is, not copied.
            requires_grad: whether it trains (parameters only; integer tensors never do).
            kind: parameter or buffer.
            aliases: further names for the same tensor.
            shape: logical shape where it differs from the tensor's.
            layout: how the tensor encodes the logical one.

        Raises:
            PipelineError: a name is taken.
        """
        if kind == "parameter":
            tensor = _parameter(tensor, requires_grad)
        self._ledger.add(self._stage, self._plugin, kind, (name, *aliases), tensor, shape, layout)

    def replace(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        requires_grad: bool | None = None,
        shape: tuple[int, ...] | None = None,
        layout: str | None = None,
        decode: Callable[[], torch.Tensor] | None = None,
        mesh: dist.ProcessGroup | DeviceMesh | None = None,
        placement: Placement | None = None,
    ) -> None:
        """Hold another tensor for a parameter or buffer, under all its names.

        Args:
            name: an existing name.
            tensor: the stored value, used as it is, not copied.
            requires_grad: whether it trains; as before if None (integer tensors never do).
            shape: logical shape; as before if None. Where the stored shape differs, say how in ``layout``.
            layout: how the stored tensor encodes the logical one; as before if None.
            decode: with a layout, computes the logical value from the tensors that the model holds at the time, for
                :meth:`value`.
            mesh: the ranks that the tensor held so far is cut over, a process group or one dimension of a mesh.
            placement: how it is cut: ``Shard(dim)``, as ``torch.chunk`` cuts. The user sees the parameter as a DTensor
                then, and norms and states are those of the whole.

        Raises:
            PipelineError: unknown name, a stored shape that differs from the logical one with layout ``"dense"``, or
                one that is not this rank's part in that placement.
        """
        current = self._ledger.latest(name)
        shape = current.shape if shape is None else tuple(shape)
        if layout is None:
            layout, decode = current.layout, current.decode
        if layout == "dense" and tuple(tensor.shape) != shape:
            raise PipelineError(
                f"Plugin {self._plugin!r} stores {name!r} as {tuple(tensor.shape)}, but its logical shape is {shape} "
                f"and its layout 'dense'.",
                "Pass `layout=` to say how the stored tensor encodes the logical one, or `shape=` to change that.",
                name=name,
            )
        placed = None if mesh is None or placement is None else Placed(mesh, placement, self._plugin)
        if current.kind == "parameter":
            train = current.requires_grad if requires_grad is None else requires_grad
            tensor = _parameter(tensor, train)
        self._ledger.write(self._stage, self._plugin, name, tensor, shape, layout, decode, placed)

    def replicate(self, name: str, mesh: dist.ProcessGroup | DeviceMesh) -> None:
        """Say that all ranks of ``mesh``, a process group or one dimension of a mesh, hold the same tensor.

        For plugins that keep parameters equal. It changes nothing that is stored.
        """
        self._ledger.replicate(name, Placed(mesh, Replicate(), self._plugin))

    def set_requires_grad(self, name: str, requires_grad: bool) -> None:
        """Freeze or unfreeze a parameter in the compiled model only: same storage, another Parameter object."""
        if self._ledger.latest(name).requires_grad != requires_grad:
            self.replace(name, self.tensor(name), requires_grad=requires_grad)

    def release_originals(self) -> None:
        """Once all plugins are done, free the storage of the user's module's tensors that were replaced.

        They become tensors on the meta device. This changes the user's module: only do it when its owner asked.
        """
        self._ledger.release_requested = True


def _parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return torch.nn.Parameter(tensor.detach(), requires_grad=requires_grad and differentiable)
