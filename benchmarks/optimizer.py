"""What an optimizer's step costs on parameters that ``fsdp`` cuts, next to plain tensors in the same memory.

One process with a process group of its own. Both move the same bytes, so what differs is what PyTorch does for each
tensor. Measured in pairs, one step of each in turn, in CPU time. Printed are the medians of
both, the median of the ratios of the pairs, and their quartiles.

    python benchmarks/optimizer.py [--pairs N] [--layers N] [--width N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import chain

import thunder_xform as tx

import torch
import torch.distributed as dist

import thunder  # isort: skip

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD with momentum, foreach": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=True),
    "SGD with momentum, fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True),
}


def parameters(layers: int, width: int) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Plain parameters and sharded ones, with gradients, in the same memory."""
    blocks = [
        [torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)]
        for _ in range(layers)
    ]
    plain = torch.nn.Sequential(*chain(*blocks))
    model = thunder.jit(plain, transforms=tx.registry.resolve(["fsdp"]))
    model(torch.randn(2, width)).square().mean().backward()
    ours = list(model.parameters())
    alike = [torch.nn.Parameter(p.to_local().detach()) for p in ours]
    for parameter, p in zip(alike, ours, strict=True):
        parameter.grad = p.grad.to_local()
    return alike, ours


def timed(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50, help="how many pairs of each")
    parser.add_argument("--layers", type=int, default=12, help="blocks of six parameters")
    parser.add_argument("--width", type=int, default=256, help="features between the blocks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        pair = parameters(arguments.layers, arguments.width)
        print(f"{'':30} {'plain':>9} {'fsdp':>9}   ratio  [quartiles]")
        for name, make in OPTIMIZERS.items():
            steps = [make(group).step for group in pair]
            found: tuple[list[float], list[float]] = ([], [])
            for number in range(arguments.pairs + 2):
                for index in (0, 1) if number % 2 else (1, 0):
                    found[index].append(timed(steps[index]))
            plain, ours = (seconds[2:] for seconds in found)
            low, middle, high = statistics.quantiles([b / a for a, b in zip(plain, ours, strict=True)], n=4)
            print(
                f"{name:30} {statistics.median(plain) * 1e3:6.2f} ms {statistics.median(ours) * 1e3:6.2f} ms  "
                f"{middle:6.3f}  [{low:.3f}, {high:.3f}]"
            )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
