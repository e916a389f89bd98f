"""What eight ranks would send: collectives counted on a fake process group, and times modelled from a published table.

    python benchmarks/eight_ranks.py               # 32 layers, narrow: some minutes
    python benchmarks/eight_ranks.py --layers 4    # the same counts for each layer

The model has the parameters and the blocks of Llama-2-7b at a width that fits a laptop. Counts depend on the layers
only, and bytes are printed in P, the bytes of all parameters, so both hold for the whole model. One rank runs; the fake
group moves nothing, so numerics mean nothing here.

The table to compare with was measured by the authors of Thunder's first `no_sync` for FSDP (lightning-thunder pull
request 45: Llama-2-7b in bfloat16, 8 H100, 4 microbatches of 1 x 4096 tokens a rank). Their scheme reduces twice a step
with `no_sync` instead of four times; this project's reduces once. Its own row is **modelled**, not measured: their step
times, less one reduction more at the time that each one saved by theirs took; their memory without `no_sync`, plus one
unsharded gradient less its shard.
"""

from __future__ import annotations

import argparse
import contextlib

import thunder_xform as tx
from thunder_xform.testing import Traffic

import thunder
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = 8
MICROBATCHES = 4
#: Of Llama-2-7b, in bfloat16.
PARAMETER_GB = 6_738_415_616 * 2 / 1e9
TOKENS = WORLD * MICROBATCHES * 4096
#: zero: (tokens/s without, with no_sync), (GB without, with), as published.
PUBLISHED = {2: ((80_341.0, 82_713.0), (40.3, 65.6)), 3: ((75_511.9, 77_839.0), (27.1, 52.5))}


class Block(torch.nn.Module):
    """Llama's block as far as parameters go: grouped like litgpt's, with a cheap mixing in place of attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 11008 // 4096
        self.norm_1, self.norm_2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.attn = torch.nn.Linear(width, 3 * width, bias=False)
        self.proj = torch.nn.Linear(width, width, bias=False)
        self.fc_1, self.fc_2 = (torch.nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attn(self.norm_1(x)).chunk(3, -1)
        x = x + self.proj(torch.sigmoid(q * k) * v)
        y = self.norm_2(x)
        return x + self.down(torch.nn.functional.silu(self.fc_1(y)) * self.fc_2(y))


class Model(torch.nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        vocabulary = width * 32000 // 4096
        self.wte = torch.nn.Embedding(vocabulary, width)
        self.h = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = torch.nn.RMSNorm(width)
        self.lm_head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def step(jitted: torch.nn.Module) -> None:
    tokens = torch.randint(0, 8, (1, 4))
    for number in range(MICROBATCHES):
        with jitted.no_sync() if number < MICROBATCHES - 1 else contextlib.nullcontext():
            jitted(tokens).sum().backward()


def count(zero: int, no_sync: bool, args: argparse.Namespace) -> dict[str, tuple[int, float]]:
    """Collectives of one step: (count, bytes on the wire of one rank / P) by kind."""
    torch.manual_seed(0)
    model = Model(args.layers, args.width)
    whole = sum(p.nbytes for p in model.parameters())
    options = {"fsdp": {"zero": zero, "reduce_each_microbatch": not no_sync}}
    jitted = thunder.jit(model, transforms=tx.registry.resolve(["fsdp"], options=options))
    step(jitted)
    with Traffic() as traffic:
        step(jitted)
    kinds = ("all_gather", "reduce_scatter")
    return {kind: (traffic.count(kind), traffic.nbytes(kind) / whole) for kind in kinds}


def report_counts(args: argparse.Namespace) -> None:
    print(
        f"One step of {MICROBATCHES} microbatches, {WORLD} ranks, {args.layers} layers, "
        f"{args.layers + 1} buckets; wire bytes of one rank in P (one pass is {1 - 1 / WORLD:.3f})"
    )
    print(f"{'':24}{'all-gathers':>24}{'reduce-scatters':>24}")
    for zero in (2, 3):
        for no_sync in (False, True):
            cells = [f"{n} / {volume:.3f} P" for n, volume in count(zero, no_sync, args).values()]
            print(f"{f'zero {zero}' + ' no_sync' * no_sync:24}" + "".join(f"{cell:>24}" for cell in cells))


def report_model() -> None:
    print(f"\nLlama-2-7b on 8 H100, P = {PARAMETER_GB:.2f} GB")
    print(f"{'':28}{'tokens/s':>10}{'gain':>8}{'GB':>8}   source")
    for zero, (speeds, memory) in PUBLISHED.items():
        without, theirs = (TOKENS / speed for speed in speeds)
        saved = (without - theirs) / 2
        ours = TOKENS / (without - (MICROBATCHES - 1) * saved)
        stash = memory[0] + PARAMETER_GB * (1 - 1 / WORLD)
        rows = [
            ("", speeds[0], memory[0], "published"),
            (" no_sync", speeds[1], memory[1], "published"),
            (" no_sync, one reduction", ours, stash, "modelled"),
        ]
        for name, speed, gigabytes, source in rows:
            print(f"{f'zero {zero}{name}':28}{speed:10,.0f}{speed / speeds[0]:8.3f}{gigabytes:8.1f}   {source}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    report_counts(args)
    report_model()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
