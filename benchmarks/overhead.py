"""What thunder-xform costs: next to Thunder without transforms, and next to bare ``importlib.metadata``.

Everything is measured in pairs, one of each in turn, and in CPU time (user and system, children included where
processes are compared), so that what else the machine does matters little. Printed are the medians of both, the median
of the ratios of the pairs, and their quartiles.

    python benchmarks/overhead.py [--pairs N] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

NAMES = ("one", "two", "three", "four", "five")
STAGES = ("weights", "adapters", "adapters", "distribute", "schedule")


@dataclass
class Comparison:
    """CPU seconds of two things measured in turn."""

    what: str
    baseline: list[float]
    ours: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / base for base, ours in zip(self.baseline, self.ours, strict=True)]

    def __str__(self) -> str:
        low, middle, high = statistics.quantiles(self.ratios, n=4)
        base, ours = statistics.median(self.baseline), statistics.median(self.ours)
        return f"{self.what:52} {spell(base):>10} {spell(ours):>10}   {middle:6.3f}  [{low:.3f}, {high:.3f}]"


def spell(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def paired(what: str, baseline: Callable[[], float], ours: Callable[[], float], pairs: int) -> Comparison:
    """Measure both in turn; which goes first alternates. One of each is thrown away."""
    baseline(), ours()
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            found[index].append((baseline, ours)[index]())
    return Comparison(what, *found)


def timed(fn: Callable[[], Any], repeat: int = 1) -> float:
    """CPU seconds of this process for one call of ``fn``, averaged over ``repeat``."""
    start = time.process_time()
    for _ in range(repeat):
        fn()
    return (time.process_time() - start) / repeat


def timed_process(command: Sequence[str], environment: dict[str, str]) -> float:
    """CPU seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compiled_models(pairs: int) -> Iterator[Comparison | str]:
    """Calls and compilations of a small model, with a pipeline that does nothing and without one."""
    import thunder_xform as tx
    from thunder_xform.testing import pipeline_of

    import torch

    import thunder  # isort: skip

    torch.set_num_threads(1)

    class Nothing(tx.Plugin[None]):
        @tx.hookimpl
        def guard_key(self, ctx: tx.Context) -> bool:
            return ctx.no_sync

    def model() -> torch.nn.Module:
        layers = [
            [torch.nn.LayerNorm(128), torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)]
            for _ in range(2)
        ]
        return torch.nn.Sequential(*chain(*layers))

    def transformed() -> Any:
        return thunder.jit(model(), transforms=pipeline_of(nothing=Nothing(None)))

    x = torch.randn(64, 128)
    yield paired(
        "compile: first call of a model",
        lambda: timed(lambda: thunder.jit(model())(x)),
        lambda: timed(lambda: transformed()(x)),
        max(3, pairs // 4),
    )
    bare, ours = thunder.jit(model()), transformed()
    bare(x), ours(x)
    yield paired("call: forward", lambda: timed(lambda: bare(x), 20), lambda: timed(lambda: ours(x), 20), pairs)

    def step(compiled: Any) -> Callable[[], None]:
        return lambda: compiled(x).sum().backward()

    yield paired("call: forward and backward", lambda: timed(step(bare), 10), lambda: timed(step(ours), 10), pairs)

    with ours.no_sync():
        ours(x)
    newest = thunder.compile_stats(ours).interpreter_cache[-1].prologue_fn

    def miss() -> None:
        try:
            newest(x)
        except Exception:
            return
        raise RuntimeError("The guard of another mode held.")

    misses = [timed(miss, 200) for _ in range(pairs)]
    low, middle, high = statistics.quantiles(misses, n=4)
    yield f"{'guard of another mode, until it fails':52} {'':>10} {spell(middle):>10}   [{spell(low)}, {spell(high)}]"


@contextmanager
def five_plugins() -> Iterator[dict[str, str]]:
    """The environment of a process that finds five more plugins installed."""
    with tempfile.TemporaryDirectory() as folder:
        for name, stage in zip(NAMES, STAGES, strict=True):
            package = Path(folder, f"bench_{name}")
            package.mkdir()
            package.joinpath("__init__.py").touch()
            package.joinpath("manifest.toml").write_text(
                f'schema = 1\nname = "bench_{name}"\nsummary = "benchmark"\nplugin = "bench_{name}:Plugin"\n'
                f'stage = "{stage}"\nprovides = ["bench.{name}"]\n'
            )
            info = Path(folder, f"bench_{name}-1.dist-info")
            info.mkdir()
            info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: bench-{name}\nVersion: 1\n")
            info.joinpath("entry_points.txt").write_text(
                f"[thunder_xform.plugins]\nbench_{name} = bench_{name}:manifest.toml\n"
            )
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        yield os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def processes(pairs: int) -> Iterator[Comparison]:
    """Whole processes, interpreter included, next to one that does the least a plugin system could do."""
    with five_plugins() as environment:

        def run(*arguments: str) -> Callable[[], float]:
            command = [sys.executable, *arguments]
            return lambda: timed_process(command, environment)

        names = [f"bench_{name}" for name in NAMES]
        scan = "from importlib.metadata import entry_points; list(entry_points(group='thunder_xform.plugins'))"
        least = run("-c", scan)
        plan = f"import thunder_xform; print(thunder_xform.registry.plan({names!r}).order)"
        for what, ours in (
            ("process: nothing", run("-c", "")),
            ("process: import thunder_xform", run("-c", "import thunder_xform")),
            ("process: thunder-xform list", run("-m", "thunder_xform.cli", "list")),
            ("process: registry.plan of five names", run("-c", plan)),
            ("process: thunder-xform plan of five names", run("-m", "thunder_xform.cli", "plan", *names)),
        ):
            yield paired(f"{what} / entry_points()", least, ours, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="how many pairs of each")
    parser.add_argument("--json", action="store_true", help="print all measurements, in CPU seconds")
    arguments = parser.parse_args()
    if not arguments.json:
        print(f"{'':52} {'baseline':>10} {'ours':>10}    ratio  [quartiles]")
    results: list[Any] = []
    for measure in (compiled_models, processes):
        for result in measure(arguments.pairs):
            results.append(asdict(result) if isinstance(result, Comparison) else result)
            if not arguments.json:
                print(result, flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
