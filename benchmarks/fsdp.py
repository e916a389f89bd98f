"""Sharded training: this project's `fsdp` plugin, PyTorch's FSDP2 and Thunder's own FSDP on one job.

    python benchmarks/fsdp.py                     # tokens/s: all variants in one launch, in turn, step by step
    python benchmarks/fsdp.py --memory            # memory: one launch a variant
    python benchmarks/fsdp.py --device cuda --world 4 --layers 24 --width 2048 --window 1024   # NCCL, a GPU a rank

Every variant trains the same GPT on the same tokens with AdamW, each with and without `no_sync` at the given gradient
accumulation. Steps of all variants alternate, so a machine that slows down slows all of them; the ratios are taken step
by step against FSDP2 with the same setting and printed as median [quartiles].

Memory is the peak of a step: resident, of live tensors, and, for the plugin, of whole weights alone. FSDP2 resizes
storages that it made before for the weights that it gathers; those do not count as live. Without sharding, whole
weights take 1 P all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import thunder_xform as tx
from thunder_xform.testing.memory import LiveBytes

import thunder
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, Config


class Job:
    """One variant: a model, its optimizer and its way to leave gradients unsynchronized."""

    def __init__(self, model: torch.nn.Module, unsynchronized: Callable[[], Any], args: argparse.Namespace) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.unsynchronized = unsynchronized
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (args.accumulation, args.batch, args.window + 1)
        self.tokens = torch.randint(0, args.vocabulary, shape, generator=generator).to(args.device)

    def step(self, no_sync: bool) -> None:
        last = len(self.tokens) - 1
        for number, tokens in enumerate(self.tokens):
            with self.unsynchronized() if no_sync and number < last else contextlib.nullcontext():
                logits = self.model(tokens[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / len(self.tokens)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def plugin(model: torch.nn.Module, zero: int, args: argparse.Namespace) -> Job:
    options = {"fsdp": {"zero": zero, "prefetch": args.prefetch}}
    executors = ["sdpa", "torchcompile"] if args.torchcompile else None
    jitted = thunder.jit(model, transforms=tx.registry.resolve(["fsdp"], options=options), executors=executors)
    return Job(jitted, jitted.no_sync, args)


def fsdp2(model: torch.nn.Module, zero: int, args: argparse.Namespace) -> Job:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=zero == 3)

    @contextlib.contextmanager
    def unsynchronized() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    return Job(model, unsynchronized, args)


def thunders_own(model: torch.nn.Module, zero: int, args: argparse.Namespace) -> Job:
    from thunder.distributed import FSDPBucketingStrategy, FSDPType
    from thunder.distributed import fsdp as thunder_fsdp

    jitted = thunder_fsdp(
        thunder.jit(model),
        device=next(model.parameters()).device,
        sharding_strategy=FSDPType.ZERO3 if zero == 3 else FSDPType.ZERO2,
        bucketing_strategy=FSDPBucketingStrategy.BLOCK,
    )
    return Job(jitted, jitted.no_sync, args)


VARIANTS = {"plugin": plugin, "FSDP2": fsdp2, "Thunder 0.2.6": thunders_own}
SETTINGS = [(zero, no_sync) for zero in (2, 3) for no_sync in (False, True)]


def build(name: str, zero: int, args: argparse.Namespace) -> Job:
    torch.manual_seed(0)
    config = Config(args.vocabulary, args.window, args.layers, args.heads, args.width, tied=False)
    return VARIANTS[name](GPT(config).to(args.device), zero, args)


def label(name: str, zero: int, no_sync: bool) -> str:
    return f"{name} zero {zero}{' no_sync' if no_sync else ''}"


def meet(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure_speed(rank: int, args: argparse.Namespace) -> None:
    jobs = {(name, zero): build(name, zero, args) for name in args.variants for zero in (2, 3)}
    seconds: dict[tuple[str, int, bool], list[float]] = {}
    for number in range(args.warmup + args.steps):
        for zero, no_sync in SETTINGS:
            for name in args.variants:
                meet(args)
                start = time.perf_counter()
                jobs[name, zero].step(no_sync)
                meet(args)
                if number >= args.warmup:
                    seconds.setdefault((name, zero, no_sync), []).append(time.perf_counter() - start)
    if rank == 0:
        report_speed(seconds, args)


def report_speed(seconds: dict[tuple[str, int, bool], list[float]], args: argparse.Namespace) -> None:
    tokens = args.accumulation * args.batch * args.window * args.world
    print(f"{'':28}{'tokens/s':>10}   ratio to FSDP2, same setting   gain of no_sync")
    for (name, zero, no_sync), spent in seconds.items():
        reference = seconds.get(("FSDP2", zero, no_sync), spent)
        ratios = [theirs / ours for ours, theirs in zip(spent, reference, strict=True)]
        gain = [a / b for a, b in zip(seconds[name, zero, False], spent, strict=True)] if no_sync else []
        note = "  (wrong gradients)" if name.startswith("Thunder") and no_sync else ""
        print(
            f"{label(name, zero, no_sync):28}{tokens / statistics.median(spent):10.0f}   {spread(ratios):28}   "
            f"{spread(gain) if gain else ''}{note}"
        )


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f} {high:.3f}]"


def measure_memory(rank: int, args: argparse.Namespace) -> None:
    name, zero, no_sync = args.only
    job = build(name, zero, args)
    config = Config(args.vocabulary, args.window, args.layers, args.heads, args.width, tied=False)
    with torch.device("meta"):
        plain = list(GPT(config).parameters())
    whole = sum(p.nbytes for p in plain)
    for _ in range(2):
        job.step(no_sync)
    resident = peak_memory(lambda: job.step(no_sync), args)
    with LiveBytes() as live:
        job.step(no_sync)
    cells = f"{label(name, zero, no_sync):28}{resident / 2**20:10.0f} MiB   {live.peak / whole:8.2f} P"
    if name == "plugin":
        with WholeWeights({p.shape for p in plain if p.ndim > 1}) as weights:
            job.step(no_sync)
        cells += f"   {weights.live.peak / whole:11.2f} P"
    if rank == 0:
        print(cells, flush=True)


class WholeWeights(TorchDispatchMode):
    """The bytes of whole weights that are alive: what a gather allocates, or joins, in a weight's shape."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.live = LiveBytes()
        self._shapes = shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        gathers = func in (torch.ops.aten.new_empty.default, torch.ops.aten.cat.default)
        if gathers and result.shape in self._shapes:
            self.live.track([result])
        return result


def peak_memory(step: Callable[[], None], args: argparse.Namespace) -> int:
    """Largest number of bytes that the process (on a GPU: its allocator) holds during a step."""
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    step()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def run(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=args.world)
    try:
        (measure_memory if args.only else measure_speed)(rank, args)
    finally:
        dist.destroy_process_group()


def launch(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (os.path.join(folder, "store"), args), nprocs=args.world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "layers": 6,
        "width": 512,
        "heads": 8,
        "vocabulary": 8192,
        "window": 64,
        "batch": 2,
        "accumulation": 4,
        "world": 2,
        "threads": 1,
        "steps": 7,
        "warmup": 1,
        "prefetch": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--memory", action="store_true", help="peak resident and live bytes, a launch a variant")
    parser.add_argument("--torchcompile", action="store_true", help="the plugin's variants use executor torchcompile")
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.memory:
        launch(args)
        return
    print(f"{'':28}{'peak memory':>14}   {'peak live':>10}   {'whole weights':>13}   (P = bytes of all parameters)")
    for zero, no_sync in SETTINGS:
        for name in args.variants:
            args.only = (name, zero, no_sync)
            launch(args)


if __name__ == "__main__":
    main()
