"""Accelerate's Accelerator, which knows transformed models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate.utils import (  # type: ignore[import-untyped]
    convert_outputs_to_fp32,
    get_mixed_precision_context_manager,
)

import thunder_xform as tx


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """:class:`accelerate.Accelerator` for models that a pipeline transforms; others it treats as ever.

    A transformed model is used as it is, without torch's DDP around it: the pipeline distributes it. ``accumulate`` and
    ``no_sync`` defer its gradient collectives, ``clip_grad_norm_`` takes the norm of the whole gradient,
    ``get_state_dict`` gives the plain model's state, and ``save_state`` writes whole tensors, which ``load_state``
    reads in any number of processes.
    """

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As in Accelerate. An optimizer that was built from the plain model trains the transformed one from now on.

        Raises:
            PipelineError: such an optimizer has taken steps already, or lacks parameters that plugins added; or the
                model's pipeline synchronizes no gradients between processes.
        """
        for item in args:
            if isinstance(item, torch.optim.Optimizer) and not _prepared(item):
                for model in (*args, *self._models):
                    if (handle := _handle(model)) is not None and handle.knows(item):
                        handle.adopt(item)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """As in Accelerate; a transformed model stays as it is, except for mixed precision."""
        handle = _handle(model)
        if handle is not None and model not in self._models:
            self._check(handle)
            model._is_accelerate_prepared = True  # type: ignore[assignment]
            handle.whole_states()
            if self.native_amp:
                context = get_mixed_precision_context_manager(self.native_amp, self.autocast_handler)
                # On the instance, where `unwrap_model(keep_fp32_wrapper=False)` looks for it.
                model.__dict__["_original_forward"] = forward = model.forward
                model.__dict__["forward"] = convert_outputs_to_fp32(context(forward))
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def _check(self, handle: tx.Handle) -> None:
        names = " -> ".join(handle.pipeline)
        if self.num_processes > 1 and not any(handle.plugin(name).process_groups() for name in handle.pipeline):
            raise tx.errors.PipelineError(
                f"{self.num_processes} processes train with {names}, which synchronizes no gradients.",
                "Add a transform that distributes the model, such as 'ddp' or 'fsdp'.",
            )
        devices = {p.device.type for p in handle.parameters.values()}
        if devices - {self.device.type}:
            raise tx.errors.PipelineError(
                f"The transformed model is on {', '.join(sorted(devices))}, but Accelerate trains on "
                f"{self.device.type}.",
                "Move the plain model to accelerator.device before thunder.jit.",
            )

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """As in Accelerate; for a transformed model, by the norm of the whole gradient over all processes.

        Raises:
            PipelineError: ``parameters`` are a part of a transformed model, or of several models.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        handles = [h for model in self._models if (h := _handle(model)) is not None]
        wanted = {id(p) for p in given if p.grad is not None}
        for handle in handles:
            own = {id(p) for p in handle.parameters.values() if p.grad is not None}
            if wanted and wanted == own:
                self.unscale_gradients()
                return handle.clip_grad_norm_(max_norm, norm_type)
            if not wanted.isdisjoint(own):
                raise tx.errors.PipelineError(
                    f"clip_grad_norm_ got {len(wanted)} gradients, but the transformed model has {len(own)}.",
                    "Clip all parameters of one model at a time: accelerator.clip_grad_norm_(model.parameters(), ...).",
                )
        norm: torch.Tensor | None = super().clip_grad_norm_(given, max_norm, norm_type)
        return norm

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """As in Accelerate; of a transformed model, the plain model's keys and shapes. A collective.

        Args:
            model: a prepared model.
            unwrap: if False, the tensors of the transformed model itself, whole, adapters apart: what training resumes
                from.
        """
        handle = _handle(model)
        if handle is not None and unwrap:
            return handle.state_dict()
        state: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap)
        return state


def _handle(model: Any) -> tx.Handle | None:
    if not isinstance(model, torch.nn.Module):
        return None
    try:
        return tx.handle(model)
    except tx.errors.PipelineError:
        return None


def _prepared(optimizer: Any) -> bool:
    return isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer)
