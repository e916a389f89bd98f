"""What an optimizer's step costs on parameters that ``fsdp`` cuts, next to plain tensors of the same shapes.

One process with a process group of its own: the shards are whole, so both move the same bytes, and what differs is
what PyTorch does for each tensor. Measured in pairs, one step of each in turn, in CPU time. Printed are the medians of
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


def models(layers: int, width: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A plain model and a transformed one, with gradients."""

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        blocks = [
            [torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)]
            for _ in range(layers)
        ]
        return torch.nn.Sequential(*chain(*blocks))

    plain, ours = made(), thunder.jit(made(), transforms=tx.registry.resolve(["fsdp"]))
    x = torch.randn(2, width)
    for model in (plain, ours):
        model(x).square().mean().backward()
    return plain, ours


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
        pair = models(arguments.layers, arguments.width)
        print(f"{'':30} {'plain':>9} {'fsdp':>9}   ratio  [quartiles]")
        for name, make in OPTIMIZERS.items():
            steps = [make(list(model.parameters())).step for model in pair]
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
