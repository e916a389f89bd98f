"""Makes ``import thunder`` work on torch releases that Thunder 0.2.6 does not know.

torch 2.13 dropped the named-tensor methods that Thunder 0.2.6 looks up on ``torch.Tensor`` while it builds its operator
tables. Each gets a stand-in while ``thunder`` is being imported, and loses it again right after: nothing but Thunder's
import ever sees one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_NAMED_TENSOR_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def _stand_in(name: str) -> Any:
    def removed(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"torch.Tensor.{name} no longer exists in this torch release.")

    # Thunder keys its tables by function name: stand-ins that share one name overwrite each other.
    removed.__name__ = removed.__qualname__ = name
    return removed


@contextmanager
def _named_tensor_methods() -> Iterator[None]:
    import torch

    missing = [name for name in _NAMED_TENSOR_METHODS if not hasattr(torch.Tensor, name)]
    for name in missing:
        setattr(torch.Tensor, name, _stand_in(name))
    try:
        yield
    finally:
        for name in missing:
            delattr(torch.Tensor, name)


@contextmanager
def _without_notices() -> Iterator[None]:
    """Let Thunder's import warn of nothing that its user can do nothing about."""
    import warnings

    with warnings.catch_warnings():
        # Optional executors that are not installed; names of torch that newer releases deprecate.
        warnings.filterwarnings("ignore", message="transformer_engine module not found", category=UserWarning)
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"(thunder|torch)(\.|$)")
        # Thunder's interpreter opens its own source to learn a type.
        warnings.filterwarnings("ignore", category=ResourceWarning)
        yield


class _ThunderLoader:
    """Runs Thunder's own loader with the stand-ins in place."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with _named_tensor_methods(), _without_notices():
            self._loader.exec_module(module)


class _ThunderFinder:
    """Wraps the loader of the top-level module ``thunder``; every other import passes untouched."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "thunder":
            return None
        # Imported here: `import thunder_xform` shall cost next to nothing.
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _ThunderLoader(spec.loader)  # type: ignore[assignment]
        return spec


def install() -> None:
    """Arrange for ``import thunder`` to succeed on any supported torch. Idempotent; imports nothing itself."""
    if "thunder" not in sys.modules and not any(isinstance(finder, _ThunderFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ThunderFinder())
