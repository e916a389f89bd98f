"""What a plugin must not change: the user's module.

A write through ``tensor.data`` leaves no trace in the tensor's version counter, so bytes are compared as well: up to
`SAMPLE` of each storage, evenly spaced, all of them where there are fewer. That costs some ten microseconds a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: Bytes of one storage that are compared.
SAMPLE = 1 << 14

_Fingerprint = tuple[int, int, int]


def fingerprint(tensor: torch.Tensor) -> _Fingerprint:
    """Where a tensor's values are, how often PyTorch saw them written, and a sample of their bytes."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0, version, 0
    stored = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    # An odd stride meets every byte of the numbers alike.
    stride = -(-stored.numel() // SAMPLE) | 1
    return tensor.data_ptr(), version, hash(stored[::stride].cpu().numpy().tobytes())


class UserModule:
    """The user's module as it is at one moment."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._modules = _modules(module)
        self._tensors = _tensors(module)

    def changes(self) -> Iterator[str]:
        """What is different now, one phrase each; nothing if all is as it was."""
        modules, tensors = _modules(self._module), _tensors(self._module)
        for was, now, kind in ((self._modules, modules, "module"), (self._tensors, tensors, "tensor")):
            yield from (f"it adds the {kind} {name!r} to the user's module" for name in now if name not in was)
            yield from (f"it removes the {kind} {name!r} from the user's module" for name in was if name not in now)
        for name, (held, training) in self._modules.items():
            if name not in modules:
                continue
            if modules[name][0] is not held:
                yield f"it replaces the module {name!r} of the user's module"
            elif modules[name][1] != training:
                yield f"it sets `training` of the user's module{f' {name!r}' if name else ''} to {not training}"
        for name, (tensor, requires_grad, before) in self._tensors.items():
            if name not in tensors:
                continue
            if tensors[name][0] is not tensor:
                yield f"it replaces the tensor {name!r} of the user's module"
            elif tensors[name][1] != requires_grad:
                yield f"it sets `requires_grad` of {name!r} in the user's module to {not requires_grad}"
            elif tensors[name][2] != before:
                yield f"it changes the values of {name!r} in the user's module"


def _modules(module: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, bool]]:
    return {name: (part, part.training) for name, part in module.named_modules()}


def _tensors(module: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool, _Fingerprint]]:
    named: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    return {name: (tensor, tensor.requires_grad, fingerprint(tensor)) for name, tensor in named}
