"""Lightning's Trainer, for LightningModules that transform their networks in ``configure_model``.

The Trainer takes LightningModules only, so what Thunder compiles is a network inside one::

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            if self.net is None:
                self.net = thunder.jit(Net(), transforms=tx.registry.resolve(["fsdp"]))

    L.Trainer(strategy=ThunderTrainerStrategy(), devices=2).fit(Module())

This module needs the distribution ``lightning``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn import Module

import thunder_xform as tx
from thunder_xform_fabric._module import is_transformed

__all__ = ["ThunderTrainerStrategy"]


class ThunderTrainerStrategy(DDPStrategy):
    """One process per device, as in Lightning's ``DDPStrategy``, without torch's DDP around the module.

    The transforms of the networks in the module distribute them.

    ``accumulate_grad_batches`` defers their gradient collectives; checkpoints hold whole tensors, which any number of
    processes loads. Clip gradients in ``configure_gradient_clipping``, by ``tx.handle(self.net).clip_grad_norm_(...)``:
    the Trainer's own clipping does not know how plugins distribute gradients and is refused.
    """

    def _setup_model(self, model: Module) -> Any:
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Check the module, create its optimizers, and make them those of its networks.

        Raises:
            PipelineError: nothing is transformed, or parameters would train outside of what is.
        """
        assert self.model is not None
        handles = self._handles()
        distributed = {id(p) for handle in handles for p in handle.parameters.values()}
        stray = [n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in distributed]
        if not handles or (stray and self.world_size > 1):
            what = f"{stray[0]!r} trains outside of" if handles else "There are"
            raise tx.errors.PipelineError(
                f"{what} {'the' if handles else 'no'} transformed networks in {type(self.model).__name__}.",
                "Put all that trains into networks that configure_model compiles with a pipeline.",
            )
        if trainer.gradient_clip_val is not None and not _overrides_clipping(self.lightning_module):
            raise tx.errors.PipelineError(
                f"gradient_clip_val={trainer.gradient_clip_val} would clip by this rank's part of the gradient.",
                "Override configure_gradient_clipping and call tx.handle(self.net).clip_grad_norm_(gradient_clip_val).",
            )
        super().setup_optimizers(trainer)
        for handle in handles:
            handle.whole_states()
            for optimizer in self.optimizers:
                if handle.knows(optimizer):
                    handle.adopt(optimizer)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load whole tensors, before the optimizers are there."""
        for handle in self._handles():
            handle.whole_states()
        super().load_model_state_dict(checkpoint, strict)

    def on_exception(self, exception: BaseException) -> None:
        """Nothing: the hints that Lightning adds are about torch's DDP."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the backward of calls made inside."""
        with ExitStack() as stack:
            for handle in self._handles():
                stack.enter_context(handle.no_sync())
            yield

    def _handles(self) -> list[tx.Handle]:
        assert self.model is not None
        return [tx.handle(module) for module in self.model.modules() if is_transformed(module)]


def _overrides_clipping(module: Any) -> bool:
    from lightning.pytorch import LightningModule

    return type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping
