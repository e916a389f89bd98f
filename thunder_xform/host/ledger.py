"""The parameter ledger: what every parameter and buffer looks like after each plugin, and who made it so.

Overrides live on the ThunderModule; the user's module is never touched. Prologue unpacking, prologue checks and
computation inputs are derived from the versions recorded here (see :mod:`thunder_xform.host.inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from thunder.core.module import ThunderModule

from thunder_xform.errors import PipelineError, closest
from thunder_xform.host.placement import Placed, check_part
from thunder_xform.host.version import Version

#: The owner of what the user's module brought along, and the stage it belongs to.
MODEL = "model"
MODEL_STAGE = -1


def _real_device(tensor: torch.Tensor) -> torch.device:
    """Device the tensor stands for: a released original sits on meta but keeps the device it came from."""
    return getattr(tensor, "_thunder_device", tensor.device)


class Ledger:
    """Versions of all parameters and buffers of one ThunderModule."""

    def __init__(self, module: ThunderModule) -> None:
        self.module = module
        self.release_requested = False
        self._history: dict[str, list[tuple[int, Version]]] = {}
        self._aliases: dict[str, tuple[str, ...]] = {}
        self._canonical: dict[str, str] = {}
        self._originals: dict[str, torch.Tensor] = {}
        #: parameters as the user sees them where that is not the stored tensor, by name
        self._distributed: dict[str, torch.nn.Parameter] = {}
        state: tuple[tuple[Literal["parameter", "buffer"], Any], ...] = (
            ("parameter", module._model.named_parameters),
            ("buffer", module._model.named_buffers),
        )
        for kind, named in state:
            groups: dict[int, list[str]] = {}
            for name, tensor in named(remove_duplicate=False):
                groups.setdefault(id(tensor), []).append(name)
                self._originals.setdefault(groups[id(tensor)][0], tensor)
            for names in groups.values():
                self._register(kind, tuple(names), self._originals[names[0]], MODEL_STAGE, MODEL)

    def _register(
        self,
        kind: Literal["parameter", "buffer"],
        names: tuple[str, ...],
        tensor: torch.Tensor,
        stage: int,
        owner: str,
        shape: tuple[int, ...] | None = None,
        layout: str = "dense",
    ) -> None:
        stored = tuple(tensor.shape)
        version = Version(
            name=names[0],
            kind=kind,
            shape=stored if shape is None else shape,
            stored_shape=stored,
            dtype=tensor.dtype,
            device=_real_device(tensor),
            requires_grad=tensor.requires_grad,
            layout=layout,
            owner=owner,
            origin=owner,
            whole_shape=stored,
            whole_layout=layout,
        )
        self._history[names[0]] = [(stage, version)]
        self._aliases[names[0]] = names
        self._canonical.update(dict.fromkeys(names, names[0]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._history)

    def __contains__(self, name: object) -> bool:
        return name in self._canonical

    def canonical(self, name: str) -> str:
        """The name under which a (possibly tied) tensor is recorded."""
        try:
            return self._canonical[name]
        except KeyError:
            raise PipelineError(
                f"The model has no parameter or buffer named {name!r}.{closest(name, self._canonical)}",
                "Use a name from `handle.parameters` or add it first.",
                name=name,
            ) from None

    def aliases(self, name: str) -> tuple[str, ...]:
        """All names of a tied tensor, in module order."""
        return self._aliases[self.canonical(name)]

    def at(self, name: str, stage: int) -> Version | None:
        """The version that holds after ``stage``, or None if the tensor does not exist by then."""
        history = self._history[self.canonical(name)]
        found = None
        for written, version in history:
            if written <= stage:
                found = version
        if found is not None and found is history[-1][1]:
            # requires_grad may be flipped by the user at any time: the live tensor is the truth.
            found = replace(found, requires_grad=self.visible(name).requires_grad)
        return found

    def latest(self, name: str) -> Version:
        """The version that stands now."""
        version = self.at(name, max(stage for stage, _ in self._history[self.canonical(name)]))
        assert version is not None
        return version

    def tensor(self, name: str) -> torch.Tensor:
        """The live tensor that the compiled model reads."""
        name = self.canonical(name)
        module = self.module
        found = module._overrides_parameters.get(name)
        return module._overrides_buffers[name] if found is None else found

    def distributed(self, name: str) -> torch.nn.Parameter | None:
        """The parameter over all ranks that the stored tensor is this rank's part of, if it is one."""
        return self._distributed.get(self.canonical(name))

    def visible(self, name: str) -> torch.Tensor:
        """The tensor as the user sees it."""
        found = self.distributed(name)
        return self.tensor(name) if found is None else found

    def distribute(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """From now on the user sees ``parameters``, by name, in the place of the stored tensors."""
        self._distributed = dict(parameters)

    def value(self, name: str) -> torch.Tensor:
        """The logical value of a parameter or buffer."""
        version = self.latest(name)
        if version.layout == "dense":
            return self.tensor(name)
        if version.decode is None:
            raise PipelineError(
                f"Plugin {version.owner!r} stores {name!r} as {version.layout!r}, and there is no way to its value.",
                "Read it in a computation, or let that plugin pass `decode` to Parameters.replace.",
                name=name,
            )
        return version.decode()

    def original(self, name: str) -> torch.Tensor | None:
        """The user's module's own tensor, or None for one that a plugin added."""
        return self._originals.get(self.canonical(name))

    def describe(self) -> dict[str, str]:
        """What every tensor looks like by name, devices aside: equal on all ranks that build the same model."""
        described = {}
        for name in self:
            version = self.latest(name)
            trained = ", trained" if version.requires_grad else ""
            ties = "".join(f", also {alias}" for alias in self._aliases[name][1:])
            described[name] = f"{version.kind} {version.shape} {version.dtype}{trained}{ties}"
        return described

    def _store(self, names: Iterable[str], kind: str, tensor: torch.Tensor) -> None:
        overrides = self.module._overrides_parameters if kind == "parameter" else self.module._overrides_buffers
        for name in names:
            overrides[name] = tensor

    def add(
        self,
        stage: int,
        owner: str,
        kind: Literal["parameter", "buffer"],
        names: tuple[str, ...],
        tensor: torch.Tensor,
        shape: tuple[int, ...] | None,
        layout: str,
    ) -> None:
        """Record a new tensor. Refuses a name that exists."""
        for name in names:
            if name in self._canonical:
                raise PipelineError(
                    f"Plugin {owner!r} adds {name!r}, which {self.latest(name).origin!r} added already.",
                    "Choose a name that contains the plugin's own name.",
                    name=name,
                )
        self._store(names, kind, tensor)
        self._register(kind, names, tensor, stage, owner, shape, layout)

    def write(
        self,
        stage: int,
        owner: str,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        layout: str,
        decode: Callable[[], torch.Tensor] | None,
        placed: Placed | None = None,
    ) -> None:
        """Record a new version of an existing tensor, under all its names."""
        name = self.canonical(name)
        current = self.latest(name)
        stored = tuple(tensor.shape)
        if placed is not None:
            check_part(placed, name, current.stored_shape, stored)
            places, whole = (*current.placed, placed), current.whole_shape
        elif stored == current.stored_shape:
            places, whole = current.placed, current.whole_shape
        else:
            # Whatever lay where, another shape says nothing about it.
            places, whole = (), stored
        self._store(self._aliases[name], current.kind, tensor)
        version = replace(
            current,
            shape=shape,
            stored_shape=stored,
            dtype=tensor.dtype,
            device=_real_device(tensor),
            requires_grad=tensor.requires_grad,
            layout=layout,
            owner=owner,
            decode=decode,
            placed=places,
            whole_shape=whole,
            whole_layout=layout if placed is None and layout != current.layout else current.whole_layout,
        )
        history = self._history[name]
        if history[-1][0] == stage:
            history.pop()
        history.append((stage, version))
        original = self._originals.get(name)
        if original is not None and original.is_meta:
            # Thunder traces with the user's tensor, and takes the device of a meta tensor from here.
            original._thunder_device = tensor.device  # type: ignore[attr-defined]

    def assign(self, name: str, tensor: torch.Tensor) -> bool:
        """Hold what a forward assigned to a buffer; whether it looks unlike what was held before."""
        if name not in self:
            self._register("buffer", (name,), tensor, MODEL_STAGE, MODEL)
            self._store((name,), "buffer", tensor)
            return True
        before = self.latest(name)
        self._store((name,), "buffer", tensor)
        if (before.stored_shape, before.dtype, before.device) == (tensor.shape, tensor.dtype, tensor.device):
            return False
        shape = tuple(tensor.shape)
        self._history[name] = [
            (stage, replace(v, shape=shape, stored_shape=shape, dtype=tensor.dtype, device=tensor.device))
            for stage, v in self._history[name]
        ]
        return True

    def replicate(self, name: str, placed: Placed) -> None:
        """Record that the ranks of ``placed`` hold copies of the stored tensor."""
        history = self._history[self.canonical(name)]
        stage, version = history[-1]
        history[-1] = stage, replace(version, placed=(*version.placed, placed))

    def release_originals(self) -> None:
        """Put meta tensors into the user's module for every parameter and buffer that a plugin replaced."""
        for name, original in list(self._originals.items()):
            if original.is_meta or self.tensor(name) is original or _shares_storage(self.tensor(name), original):
                continue
            released = original.detach().to("meta")
            if isinstance(original, torch.nn.Parameter):
                released = torch.nn.Parameter(released, requires_grad=original.requires_grad)
            # Thunder's tracer takes the device of a meta tensor from here.
            released._thunder_device = original.device  # type: ignore[attr-defined]
            for alias in self._aliases[name]:
                path, _, leaf = alias.rpartition(".")
                owner = self.module._model.get_submodule(path)
                (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = released
            self._originals[name] = released


def _shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
