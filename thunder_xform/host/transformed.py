"""The class of a transformed model: a ThunderModule that behaves as one ordinary module.

Thunder keeps the user's module as a submodule, so everything that walks modules (an outer ``nn.Sequential``, Fabric's
wrapper, an optimizer built from the outer model) finds the user's parameters instead of the transformed ones. Here the
transformed model has no submodules and owns its parameters under their plain dotted names; PyTorch's own methods do the
rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import make_opaque
from thunder.core.module import ThunderModule

from thunder_xform.errors import PipelineError
from thunder_xform.host.functions import adopt
from thunder_xform.host.ledger import Ledger
from thunder_xform.host.untraceable import explain

_SESSION = "_thunder_xform_session"
_LEFT_ALONE = "_thunder_xform_left_alone"
_Module = torch.nn.Module


@make_opaque
def _inside_another_function(module: TransformedModule) -> bool:
    """Whether a jitted function that contains ``module`` is being traced, which then adopts its transforms."""
    return adopt(module, session_of(module))


@make_opaque
def _being_traced() -> bool:
    return get_compile_data() is not None


class TransformedModule(ThunderModule):
    """A model transformed by a pipeline. Made by :func:`attach`, never by hand."""

    named_parameters = _Module.named_parameters
    named_buffers = _Module.named_buffers
    state_dict = _Module.state_dict
    load_state_dict = _Module.load_state_dict

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _inside_another_function(self):
            return self._model(*args, **kwargs)
        session = self.__dict__[_SESSION]
        session.originals.check()
        session.optimizers.look_again()
        if session.assigned.changed:
            with session.assigned.shown():
                return self._run(session, args, kwargs)
        return self._run(session, args, kwargs)

    def _run(self, session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, check = self._forward_fn, session.check
        try:
            return call(*args, **kwargs) if check is None else check.call(call, args, kwargs)
        except Exception as error:
            explain(error, self._model, session.watch.refusal())
            raise

    def __getattr__(self, name: str) -> Any:
        session = self.__dict__.get(_SESSION)
        if session is None or _being_traced():
            return super().__getattr__(name)
        return getattr(session.parts.view(self._model), name)

    def __setattr__(self, name: str, value: Any) -> None:
        session = self.__dict__.get(_SESSION)
        if session is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(self._model, name):
            super().__setattr__(name, value)
        else:
            setattr(session.parts.view(self._model), name, value)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """A part of the user's module, with the tensors that the compiled model holds."""
        found: torch.nn.Module = super().get_submodule(target)
        return found if _being_traced() else self.__dict__[_SESSION].parts.view(found)

    @property
    def _is_accelerate_prepared(self) -> bool:
        # Hugging Face Accelerate asks this. On several ranks it wraps what is not prepared in torch's DDP, which
        # overwrites shards.
        prepared = bool(self.__dict__.get(_LEFT_ALONE, False))
        if not prepared and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise PipelineError(
                "Accelerate would wrap this transformed model in torch's DDP.",
                "Use the Accelerator of thunder_xform_accelerate (distribution thunder-xform-accelerate).",
            )
        return prepared

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self.__dict__[_LEFT_ALONE] = prepared

    def train(self, mode: bool = True) -> TransformedModule:
        """Set training mode; the flags are those of the user's module."""
        self._model.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, those included that ``no_sync`` keeps outside of ``.grad``.

        An optimizer's ``zero_grad`` knows of ``.grad`` only.
        """
        super().zero_grad(set_to_none)
        self.__dict__[_SESSION].hooks.each("discard_gradients")

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally in the backward of calls made inside; see ``Handle.no_sync``."""
        inside: AbstractContextManager[None] = self.__dict__[_SESSION].no_sync()
        return inside

    @property
    def _ledger(self) -> Ledger:
        ledger: Ledger = self.__dict__[_SESSION].ledger
        return ledger

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """The parameter as ``named_parameters()`` yields it."""
        found = self._parameters.get(target)
        return super().get_parameter(target) if found is None else found

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            error_msgs.append(
                "load_state_dict(assign=True) would put tensors past the transforms. Load without it, or through "
                "thunder_xform.handle(model).load_state_dict."
            )
            return
        # PyTorch takes the first component of a key for a submodule; here names are dotted and there are none.
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, [], error_msgs)
        if strict:
            saved = (*self._parameters, *(self._buffers.keys() - self._non_persistent_buffers_set))
            known = {prefix + name for name in saved}
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TransformedModule:
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            if tensor is None:
                continue
            made = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (made.dtype, made.device) != (tensor.dtype, tensor.device):
                raise PipelineError(
                    f"Cannot convert {name!r} of a transformed model from {tensor.dtype} on {tensor.device} to "
                    f"{made.dtype} on {made.device}.",
                    "Convert the plain model before thunder.jit.",
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise PipelineError(
            "A transformed model cannot be copied: its compiled code and process groups belong to it.",
            "Copy the plain model and transform the copy with a freshly resolved pipeline.",
        )


def attach(module: ThunderModule, session: Any) -> None:
    """Make a ThunderModule a :class:`TransformedModule` that belongs to ``session``."""
    module.__class__ = _class_for(module._modules["_model"])
    module.__dict__["_model"] = module._modules.pop("_model")
    module.__dict__["_parameters"] = _visible(module, session)
    module.__dict__["_buffers"] = module._overrides_buffers
    module.__dict__["_non_persistent_buffers_set"] = _non_persistent(module._model)
    module.__dict__[_SESSION] = session


def _class_for(model: torch.nn.Module) -> type[TransformedModule]:
    """:class:`TransformedModule` with the signature of the model's forward, which trainers choose columns by."""
    try:
        signature = inspect.signature(model.forward)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = signature.replace(parameters=[itself, *signature.parameters.values()])
    except (TypeError, ValueError):
        return TransformedModule
    general = TransformedModule.forward
    forward = FunctionType(general.__code__, general.__globals__, general.__name__)
    forward.__signature__ = signature  # type: ignore[attr-defined]
    names = {"forward": forward, "__module__": __name__, "__doc__": TransformedModule.__doc__}
    return type("TransformedModule", (TransformedModule,), names)


def _visible(module: ThunderModule, session: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters as the user sees them: over all ranks where they are distributed."""
    stored, ledger = module._overrides_parameters, session.ledger
    distributed = any(ledger.distributed(name) is not None for name in stored)
    return {name: ledger.visible(name) for name in stored} if distributed else stored


def _non_persistent(model: torch.nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def session_of(module: Any) -> Any | None:
    """The session that transforms ``module``, or None."""
    return getattr(module, "__dict__", {}).get(_SESSION)
