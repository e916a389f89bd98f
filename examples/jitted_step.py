"""A whole training step, loss included, compiled as one function that contains a transformed model.

    torchrun --nproc-per-node 2 examples/jitted_step.py

Needs thunder-xform-ddp.
"""

import argparse

import thunder_xform as tx

import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F

import text
from gpt import GPT, Config
from windows import Windows


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = GPT(Config(window=64, layers=args.layers, width=args.width))
    # The pipeline is bound to the model that it transforms; the function finds it wherever it uses that model.
    pipeline = tx.registry.resolve(["ddp"]).bind(model)
    compiled = thunder.jit(loss_of, transforms=pipeline)
    optimizer = torch.optim.AdamW(pipeline.model.parameters(), lr=3e-3)

    batches = Windows(text.language_reference(), 64).random(size=8, seed=dist.get_rank())
    for step in range(args.steps):
        with tx.handle(compiled).no_sync():
            first = compiled(model, *next(batches)) / 2
            first.backward()
        second = compiled(model, *next(batches)) / 2
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = (first + second).detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {total.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
