"""Lightning's Trainer on two ranks against the same loop in plain PyTorch in one process."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from thunder_xform.testing import RankPool, Traffic, torchrun_environment

STEPS, ACCUMULATION = 3, 2


def made():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def data(rank):
    generator = torch.Generator().manual_seed(50 + rank)
    count = STEPS * ACCUMULATION
    return [(torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)) for _ in range(count)]


def plain(clip=None, resumed=False):
    """Weights after an epoch of two ranks, and one more of the first rank alone if it is ``resumed``."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    epochs = [*zip(data(0), data(1), strict=True), *(zip(data(0), strict=True) if resumed else ())]
    for call, batches in enumerate(epochs):
        sum(F.mse_loss(model(x), y) for x, y in batches).div(len(batches) * ACCUMULATION).backward()
        if (call + 1) % ACCUMULATION == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def fit(name, folder, clip=None, own_clipping=True, resumed=False):
    import lightning as L
    import thunder

    import thunder_xform as tx
    from thunder_xform_fabric.trainer import ThunderTrainerStrategy

    class Base(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            if self.net is None:
                self.net = thunder.jit(made(), transforms=tx.registry.resolve([name]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters(), lr=0.05)

        def training_step(self, batch):
            x, y = batch
            return F.mse_loss(self.net(x), y)

    class Clipping(Base):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            if gradient_clip_val is not None:
                tx.handle(self.net).clip_grad_norm_(gradient_clip_val)

    os.environ.update(torchrun_environment())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ThunderTrainerStrategy(),
        max_epochs=2 if resumed else 1,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=clip,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = (Clipping if own_clipping else Base)()
    try:
        with Traffic() as traffic:
            loader = torch.utils.data.DataLoader(data(dist.get_rank()), batch_size=None)
            trainer.fit(module, loader, ckpt_path=f"{folder}/end.ckpt" if resumed else None)
    except tx.errors.PipelineError as error:
        return str(error)
    trainer.save_checkpoint(f"{folder}/{'resumed' if resumed else 'end'}.ckpt")
    full = {key: value.clone() for key, value in tx.handle(module.net).state_dict().items()}
    return full, traffic.count("all_reduce" if name == "ddp" else "reduce_scatter")


@pytest.fixture(scope="module")
def one():
    with RankPool(world_size=1) as pool:
        yield pool


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_fit(ranks, one, name, tmp_path):
    expected = plain(clip=0.1)
    for full, reductions in ranks.run(fit, name, tmp_path, clip=0.1):
        for key, tensor in expected.items():
            torch.testing.assert_close(full[key], tensor, atol=1e-6, rtol=0)
        if name == "fsdp":  # One bucket, reduced once a step; the norm takes an all-reduce of its own.
            assert reductions == STEPS
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
    for key, tensor in expected.items():
        torch.testing.assert_close(checkpoint["state_dict"][f"net.{key}"], tensor, atol=1e-6, rtol=0)
    moments = checkpoint["optimizer_states"][0]["state"]
    assert [tuple(moments[i]["exp_avg"].shape) for i in range(4)] == [tuple(p.shape) for p in expected.values()]
    # Of two ranks' training, one goes on.
    ((full, _),) = one.run(fit, name, tmp_path, clip=0.1, resumed=True)
    for key, tensor in plain(clip=0.1, resumed=True).items():
        torch.testing.assert_close(full[key], tensor, atol=1e-6, rtol=0)


def test_clipping_by_a_part_of_the_gradient_is_refused(ranks, tmp_path):
    for message in ranks.run(fit, "fsdp", tmp_path, clip=0.1, own_clipping=False):
        assert "would clip by this rank's part of the gradient" in message
