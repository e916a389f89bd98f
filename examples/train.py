"""Train a small GPT on one text, then fine-tune it, sharded, with LoRA on another, on all ranks of a torchrun.

    torchrun --nproc-per-node 2 examples/train.py

leaves base.safetensors, adapter.safetensors, metrics.json and loss.png in a folder. `make demo` runs it.
"""

import argparse
import json
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import thunder_xform as tx

import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.optim.lr_scheduler import LambdaLR

import options
import report
from gpt import GPT, Config
from windows import Batch, Windows

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["qkv", "out", "up", "down"]}


@dataclass(frozen=True)
class Stage:
    """What tells one stage of training from another; the loop is the same."""

    name: str
    plugins: list[str]
    options: dict[str, Any]
    text: str
    steps: int
    peak_lr: float


@record  # torchrun shows the traceback of the rank that failed first
def main() -> None:
    args = options.parse(__doc__)
    first = Stage("pretraining", ["ddp"], {}, args.pretraining, args.steps, args.lr)
    plugins, chosen = ["fsdp", "lora"], {"lora": LORA}
    if args.quant != "none":
        plugins, chosen = [*plugins, "quant"], chosen | {"quant": {"scheme": args.quant}}
    second = Stage("fine-tuning", plugins, chosen, args.finetuning, args.finetune_steps, args.finetune_lr)
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0)
    torch.manual_seed(args.seed)
    config = Config(window=args.window, layers=args.layers, heads=args.heads, width=args.width)
    gpt = GPT(config)

    handle, pretraining = train(gpt, first, args, console)
    gpt.load_state_dict(handle.state_dict())  # training left the module itself as it was
    handle, finetuning = train(gpt, second, args, console)
    console.print(report.base_memory(gpt, handle))

    tx.checkpoint.save_adapter(handle, args.out / "adapter.safetensors")
    if dist.get_rank() == 0:
        save_model(gpt, str(args.out / "base.safetensors"), {"config": json.dumps(asdict(config))})
        report.save([pretraining, finetuning], args.out)
    console.print(report.table([pretraining, finetuning]))
    dist.destroy_process_group()


def train(
    module: nn.Module, stage: Stage, args: argparse.Namespace, console: Console
) -> tuple[tx.Handle, report.Curve]:
    pipeline = tx.registry.resolve(stage.plugins, options=stage.options, check="eager" if args.check else None)
    model = thunder.jit(module, transforms=pipeline)
    handle = tx.handle(model)

    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=stage.peak_lr, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, lambda step: warmup_and_cosine(step, stage.steps))
    windows = Windows(stage.text, args.window)
    batches = windows.random(args.batch, seed=1000 * args.seed + rank)
    held_out = windows.spread(args.batch, 8, rank, world_size)
    trained = [handle.version(name).shape for name, p in handle.parameters.items() if p.requires_grad]
    curve = report.Curve(stage.name, list(handle.pipeline), sum(map(math.prod, trained)))

    with report.Progress(curve, stage.steps, console) as progress:
        curve.before = validate(model, held_out)
        model.train()
        for step in range(stage.steps):
            if args.fail_at == f"{rank}:{step}":
                raise RuntimeError(f"Rank {rank} fails at step {step} of {stage.name}, as --fail-at asked.")
            losses = []
            for last in [False] * (args.accumulate - 1) + [True]:
                with nullcontext() if last else handle.no_sync():
                    loss = loss_of(model, next(batches)) / args.accumulate
                    loss.backward()
                losses.append(loss.detach())
            handle.clip_grad_norm_(1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            tokens = args.batch * args.window * args.accumulate * world_size
            progress.step(mean_over_ranks(torch.stack(losses).sum()), tokens)
        curve.after = validate(model, held_out)
    if args.check:
        console.print(f"{stage.name}: {handle.events[0].check}")
    return handle, curve


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, batches: list[Batch]) -> float:
    model.eval()
    return mean_over_ranks(torch.stack([loss_of(model, batch) for batch in batches]).mean())


def warmup_and_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate: up over 20 steps, then down to nothing."""
    return min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
