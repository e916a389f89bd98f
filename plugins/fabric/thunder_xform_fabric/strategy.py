"""The strategy that runs any pipeline of transforms."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import Module
from torch.optim import Optimizer

import thunder_xform as tx
from thunder_xform_fabric import _sharded
from thunder_xform_fabric._lightning import (
    BackwardSyncControl,
    DDPStrategy,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from thunder_xform_fabric._module import is_transformed, transform

_PRECISIONS = (Precision, HalfPrecision, MixedPrecision, DoublePrecision)


class ThunderStrategy(DDPStrategy):
    """Train models that Thunder compiles through a pipeline of transforms, one process per device.

    Processes and process groups are those of Fabric's ``DDPStrategy``; the model is never wrapped in torch's DDP.

    Args:
        transforms: what :func:`thunder_xform.registry.resolve` takes, resolved anew for every model that is set up;
            or a pipeline, for one model. With several processes, one of the transforms must distribute the model.
        options: options by plugin name.
        jit: compile the model. If False it is transformed only, for functions that contain it and that ``thunder.jit``
            compiles.
        executors: Thunder executors to compile with; Thunder's default if None.
        state_dict_type: what ``fabric.save`` writes: ``"full"``, one file that the plain model loads, or ``"sharded"``,
            a directory in the format of torch.distributed.checkpoint, which any number of processes loads.
        kwargs: arguments of Fabric's ``DDPStrategy`` that concern processes: ``accelerator``, ``parallel_devices``,
            ``cluster_environment``, ``checkpoint_io``, ``precision``, ``process_group_backend``, ``timeout``,
            ``start_method``.

    Raises:
        PipelineError: there are no transforms, or the arguments contradict each other.
        TypeError: an unknown argument.
    """

    def __init__(
        self,
        transforms: Any,
        *,
        options: Mapping[str, Any] | None = None,
        jit: bool = True,
        executors: Any = None,
        state_dict_type: Literal["full", "sharded"] = "full",
        **kwargs: Any,
    ) -> None:
        if not transforms:
            raise tx.errors.PipelineError(
                f"{type(self).__name__} got no transforms.", 'Name some, for example ["ddp"] or ["fsdp", "lora"].'
            )
        if isinstance(transforms, tx.Pipeline) and options:
            raise tx.errors.PipelineError(
                f"{type(self).__name__} got a pipeline and options.", "Pass options where the pipeline is resolved."
            )
        if executors is not None and not jit:
            raise tx.errors.PipelineError(
                f"{type(self).__name__} got executors, but with jit=False it compiles nothing.",
                "Pass executors= to the thunder.jit of the function that contains the model.",
            )
        if state_dict_type not in ("full", "sharded"):
            raise tx.errors.PipelineError(
                f"{type(self).__name__} got state_dict_type={state_dict_type!r}.", "Use 'full' or 'sharded'."
            )
        super().__init__(**kwargs)
        if self._ddp_kwargs:
            raise TypeError(f"{type(self).__name__} has no argument {next(iter(self._ddp_kwargs))!r}.")
        self._transforms = transforms
        self._options = dict(options or {})
        self._jit = jit
        self._executors = executors
        self._state_dict_type = state_dict_type
        self._backward_sync_control = _NoSync()
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()

    @property
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None and type(precision) not in _PRECISIONS:
            raise TypeError(
                f"{type(self).__name__} does not support {type(precision).__name__}. Use one of "
                f"{', '.join(p.__name__ for p in _PRECISIONS)}."
            )
        self._precision = precision

    # -- set-up --------------------------------------------------------------------------------------------------

    def setup_module(self, module: Module) -> Any:
        """Transform the module, compiled or not; take it as it is if this strategy's pipeline transforms it already.

        Raises:
            PipelineError: another pipeline transforms it, or this one leaves several processes unsynchronized.
        """
        pipeline = self._pipeline()
        ours = pipeline.model is module
        model = module if ours else transform(module, pipeline, self._jit, self._executors)
        self._models.add(model)
        return model

    def _pipeline(self) -> tx.Pipeline:
        if isinstance(self._transforms, tx.Pipeline):
            pipeline = self._transforms
        else:
            pipeline = tx.registry.resolve(self._transforms, options=self._options)
        provided = [claim for step in pipeline.resolution.steps for claim in step.manifest.provides]
        if self.world_size > 1 and not any(claim.startswith("parallel.") for claim in provided):
            raise tx.errors.PipelineError(
                f"{self.world_size} processes train with {pipeline.resolution.text}, which synchronizes no gradients.",
                "Add a transform that distributes the model, such as 'ddp' or 'fsdp'.",
            )
        return pipeline

    def module_to_device(self, module: Module) -> None:
        """Move the module, unless its parameters have no data yet."""
        if not any(p.is_meta for p in module.parameters()):
            module.to(self.root_device)

    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Module, list[Optimizer], Any]:
        """Transform the module, and let optimizers that were built from it train the transformed one."""
        model = self.setup_module(module)
        return model, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Bind the optimizer to the model that it trains, which must be set up.

        Raises:
            PipelineError: no model that is set up has its parameters.
        """
        for model in self._models:
            handle = tx.handle(model)
            if handle.knows(optimizer):
                handle.adopt(optimizer)
                return optimizer
        raise tx.errors.PipelineError(
            f"{type(optimizer).__name__} holds no parameter of a model that was set up.",
            "Set up the model first or together with it: fabric.setup(model, optimizer).",
        )

    # -- gradients -----------------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Scale the gradients of the model so that their norm, over all ranks, is at most ``max_norm``."""
        self.precision.unscale_gradients(optimizer)
        norm = tx.handle(module).clip_grad_norm_(float(max_norm), float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The norm of order {norm_type} of the gradients is {norm.item()}. To clip regardless, call with "
                f"error_if_nonfinite=False."
            )
        return norm

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """The full state: keys and shapes of the plain model. A collective."""
        return tx.handle(module).state_dict() if is_transformed(module) else module.state_dict()

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a full state."""
        if is_transformed(module):
            tx.handle(module).load_state_dict(state_dict, strict=strict)
        else:
            module.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint, as a file or a directory (``state_dict_type``). Call it on every rank."""
        if self._state_dict_type == "full":
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if storage_options is not None or filter:
            raise tx.errors.CheckpointError(
                "Sharded checkpoints take neither storage_options nor a filter.",
                'Leave them out, or use state_dict_type="full".',
            )
        _sharded.save(Path(self.broadcast(path)), state, self.is_global_zero)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of either type, from any number of processes. Call it on every rank."""
        path = Path(self.broadcast(path))
        if _sharded.is_sharded(path):
            return _sharded.load(path, state, strict, weights_only)
        remainder: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
        return remainder


class _NoSync(BackwardSyncControl):
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Accumulate gradients locally in the backward of calls made inside."""
        return tx.handle(module).no_sync() if enabled else nullcontext()
