"""Parts of the user's module as a transformed model hands them out: with the tensors that the compiled model holds.

A part is a view: of the same class as the user's submodule and with the same attributes, but its parameters, buffers
and submodules are the transformed model's. Where the compiled model computes something else than the submodule would,
or holds a tensor in another form, asking is an error that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from thunder.core.compile_data import get_compile_data

from thunder_xform.errors import PipelineError

_Module = torch.nn.Module
_OWN = ("_parts", "_path", "_plain")


class Parts:
    """Hands out the parts of one transformed model.

    Args:
        session: the transformation.
        rewriters: names of plugins that compute something else than the model's operators say.
    """

    def __init__(self, session: Any, rewriters: tuple[str, ...]) -> None:
        self.session = session
        self.rewriters = rewriters
        self._root = session.module._model
        self._made: dict[int, Any] = {}
        self._paths = {id(module): path for path, module in self._root.named_modules()}

    @property
    def whole(self) -> str:
        """The model's class, for messages."""
        return type(self._root).__name__

    def view(self, value: Any) -> Any:
        """``value``, with a part for each of the user's modules in it."""
        if isinstance(value, _Module):
            return self._part(value) if id(value) in self._paths and not isinstance(value, _Part) else value
        if type(value) in (list, tuple) and any(isinstance(item, _Module) for item in value):
            return type(value)(map(self.view, value))
        if type(value) is dict and any(isinstance(item, _Module) for item in value.values()):
            return {key: self.view(item) for key, item in value.items()}
        return value

    def _part(self, module: _Module) -> Any:
        made = self._made.get(id(module))
        if made is None:
            namespace = {"__module__": type(module).__module__, "_parts": self, "_path": self._paths[id(module)]}
            kind = type(type(module).__name__, (_Part, type(module)), {**namespace, "_plain": module})
            made = object.__new__(kind)
            object.__setattr__(made, "__dict__", vars(module))
            self._made[id(module)] = made
        return made

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer of the user's module as the transformed model's ``named_parameters()`` yields it."""
        ledger = self.session.ledger
        version = ledger.latest(name)
        if version.whole_layout != "dense":
            raise PipelineError(
                f"{name!r} of the transformed {self.whole} is held as {version.layout!r} by {version.owner!r}.",
                f"Read thunder_xform.handle(model).state_dict()[{name!r}].",
                name=name,
            )
        tensor: torch.Tensor = ledger.visible(name)
        return tensor

    def check_call(self, path: str) -> None:
        """Raise unless running the part eagerly gives what the compiled model gives, gradients included."""
        if get_compile_data() is not None:
            self._refuse(path, "thunder.jit would compile it without them")
        if self.rewriters:
            self._refuse(path, f"{', '.join(map(repr, self.rewriters))} changed what the model computes")
        inside = (n for n in self.session.ledger if n.startswith(f"{path}."))
        if any(self.session.ledger.distributed(name) is not None for name in inside):
            self._refuse(path, "its parameters lie on several ranks")
        if self.session.groups and torch.is_grad_enabled():
            self._refuse(path, "its gradients would not be reduced", " Under torch.no_grad() the part runs alone, too.")

    def _refuse(self, path: str, why: str, remedy: str = "") -> NoReturn:
        raise PipelineError(
            f"Running {path!r} of the transformed {self.whole} by itself would go past the transforms: {why}.",
            f"Call the model itself.{remedy}",
            name=path,
        )


class _Members(Mapping[str, Any]):
    """Parameters, buffers or modules of a part, as ``nn.Module`` keeps them."""

    def __init__(self, part: _Part, kind: str) -> None:
        self._names = vars(type(part)._plain)[kind]
        self._part = part

    def __getitem__(self, name: str) -> Any:
        plain = self._names[name]
        if plain is None:
            return None
        if isinstance(plain, _Module):
            return self._part._parts.view(plain)
        path = self._part._path
        return self._part._parts.tensor(f"{path}.{name}" if path else name)

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Part(_Module):
    """Comes before the class of the user's submodule. Shares the submodule's attributes, its tensors aside."""

    _parts: Parts
    _path: str
    _plain: _Module

    # nn.Module reads these from the instance; as properties of the class they come first.
    _parameters = property(lambda self: _Members(self, "_parameters"))
    _buffers = property(lambda self: _Members(self, "_buffers"))
    _modules = property(lambda self: _Members(self, "_modules"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._path:
            return self._parts.session.module(*args, **kwargs)
        self._parts.check_call(self._path)
        return super().__call__(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value if name in _OWN or name.startswith("__") else type(self)._parts.view(value)

    def __getattr__(self, name: str) -> Any:
        for members in (self._parameters, self._buffers, self._modules):
            if name in members:
                return members[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and self._buffers.get(name) is not None:
            self._parts.session.assigned.assign(f"{self._path}.{name}" if self._path else name, value)
            return
        if isinstance(value, (torch.nn.Parameter, _Module)) or any(
            name in vars(type(self)._plain)[kind] for kind in ("_parameters", "_buffers", "_modules")
        ):
            self._refuse_change(name)
        setattr(type(self)._plain, name, value)

    def __delattr__(self, name: str) -> None:
        if name not in vars(type(self)._plain):
            self._refuse_change(name)
        delattr(type(self)._plain, name)

    def _refuse_change(self, name: str) -> NoReturn:
        full = f"{self._path}.{name}" if self._path else name
        raise PipelineError(
            f"{full!r} of the transformed {self._parts.whole} cannot be replaced, added or removed.",
            "Change values in place, or the plain model before thunder.jit.",
            name=full,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise PipelineError(
            f"{self._path!r} of the transformed {self._parts.whole} cannot be moved or converted.",
            "Convert the plain model before thunder.jit.",
            name=self._path,
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PipelineError(
            f"{self._path!r} of the transformed {self._parts.whole} cannot be copied: it is a view.",
            "Copy the plain model's, and load this one's state_dict() into the copy.",
            name=self._path,
        )
