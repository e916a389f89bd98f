"""Everything that is to be seen on GPUs, in one run: first that it is right, then how fast.

    python benchmarks/gpu.py                    # NCCL, one rank a GPU; one GPU is enough
    python benchmarks/gpu.py --device cpu       # the same checks on gloo, two ranks, where there is no GPU

Trains a small GPT through each combination of plugins, with accumulation under `no_sync`, next to plain PyTorch on the
same device in each rank: the losses of all steps must agree. Then runs `benchmarks/fsdp.py` at a larger size.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import thunder_xform as tx

import thunder
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, Config

HERE = Path(__file__).parent
STEPS, MICROBATCHES, VOCABULARY, WINDOW = 6, 3, 256, 64
TOLERANCE = 2e-4  # float32 losses after some AdamW steps; kernels that Thunder chooses may sum in another order
CASES: list[tuple[list[str], dict[str, Any]]] = [
    (["ddp"], {}),
    (["fsdp"], {"fsdp": {"zero": 2}}),
    (["fsdp"], {"fsdp": {"zero": 3}}),
    (["fsdp"], {"fsdp": {"zero": 3, "units": "layer", "prefetch": 2}}),
    (["fsdp"], {"fsdp": {"zero": 3, "reduce_each_microbatch": True}}),
]


def batches(rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCABULARY, (MICROBATCHES, 2, WINDOW + 1), generator=generator).to(device)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def made(device: torch.device) -> GPT:
    torch.manual_seed(0)
    return GPT(Config(VOCABULARY, WINDOW, 2, 4, 64, tied=True)).to(device)


def expected(device: torch.device) -> list[float]:
    """Losses of all ranks' data in plain PyTorch, averaged over microbatches and ranks."""
    model = made(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        tokens = [microbatch for rank in range(dist.get_world_size()) for microbatch in batches(rank, device)]
        losses = [loss_of(model, microbatch) / len(tokens) for microbatch in tokens]
        torch.stack(losses).sum().backward()
        found.append(sum(loss.item() for loss in losses))
        optimizer.step()
        optimizer.zero_grad()
    return found


def train(names: list[str], options: dict[str, Any], device: torch.device) -> list[float]:
    model = thunder.jit(made(device), transforms=tx.registry.resolve(names, options=options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        total = torch.zeros((), device=device)
        for number, microbatch in enumerate(batches(dist.get_rank(), device)):
            with model.no_sync() if number < MICROBATCHES - 1 else contextlib.nullcontext():
                loss = loss_of(model, microbatch) / MICROBATCHES
                loss.backward()
                total += loss.detach()
        dist.all_reduce(total)
        found.append(total.item() / dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
    return found


def check(rank: int, store: str, args: argparse.Namespace) -> None:
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    try:
        reference = expected(device)
        worst = 0.0
        for names, options in CASES:
            losses = train(names, options, device)
            difference = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
            worst = max(worst, difference)
            if rank == 0:
                print(f"{'+'.join(names)} {options}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, off by {difference:.1e}")
    finally:
        dist.destroy_process_group()
    if worst > TOLERANCE:
        raise SystemExit(f"Losses differ from plain PyTorch's by up to {worst:.1e}; {TOLERANCE:.0e} is allowed.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    args.ranks = torch.cuda.device_count() if args.device == "cuda" else 2
    if not args.ranks:
        parser.error("torch finds no GPU; --device cpu runs the checks without one")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(check, (os.path.join(folder, "store"), args), nprocs=args.ranks)
    size = (
        {"layers": 24, "width": 1024, "heads": 16, "window": 1024, "batch": 4}
        if args.device == "cuda"
        else {"layers": 1}
    )
    options = [f"--{name}={value}" for name, value in ({"device": args.device, "world": args.ranks} | size).items()]
    for extra in ([], ["--memory"]):
        subprocess.run([sys.executable, HERE / "fsdp.py", *options, *extra], check=True)


if __name__ == "__main__":
    main()
