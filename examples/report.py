"""What a run shows and leaves behind: progress on the terminal, numbers, and a picture of the loss."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import thunder_xform as tx

from rich import progress
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass
class Curve:
    """One stage of training. Losses are in nats per byte, averaged over all ranks."""

    name: str
    pipeline: list[str]
    trained: int
    """Parameters that the optimizer updates."""
    before: float = float("nan")
    """Validation loss before training."""
    losses: list[float] = field(default_factory=list)
    after: float = float("nan")
    """Validation loss after training."""
    tokens_per_second: float = float("nan")
    """Of all ranks, compilation excluded."""
    seconds: float = 0.0
    """Compilation and validation included."""


class Progress:
    """Follows one stage into its curve and onto the terminal."""

    def __init__(self, curve: Curve, steps: int, console: Console) -> None:
        self._curve = curve
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[state]}"),
            progress.TimeElapsedColumn(),
            console=console,
        )
        self._after_first = 0.0
        self._task = self._bar.add_task(curve.name, total=steps, state="compiling")

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._bar.start()
        return self

    def step(self, loss: float, tokens: int) -> None:
        """Count a step over `tokens` tokens of all ranks. The first compiled: the clock starts after it."""
        now = time.perf_counter()
        if self._curve.losses:
            self._curve.tokens_per_second = len(self._curve.losses) * tokens / (now - self._after_first)
        else:
            self._after_first = now
        self._curve.losses.append(loss)
        state = f"loss {loss:.3f}  {self._curve.tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, advance=1, state=state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._curve.seconds = time.perf_counter() - self._started
        self._bar.stop()


def save(curves: list[Curve], folder: Path) -> None:
    """Write metrics.json and loss.png."""
    (folder / "metrics.json").write_text(json.dumps([asdict(curve) for curve in curves], indent=2) + "\n")
    plot(curves, folder / "loss.png")


def table(curves: list[Curve]) -> Table:
    result = Table(title="Validation loss in nats per byte", show_edge=False)
    for heading in "stage", "pipeline", "trained", "before", "after", "tokens/s", "seconds":
        result.add_column(heading, justify="left" if heading in {"stage", "pipeline"} else "right", no_wrap=True)
    for curve in curves:
        result.add_row(
            curve.name,
            " -> ".join(curve.pipeline),
            f"{curve.trained:,}",
            f"{curve.before:.3f}",
            f"{curve.after:.3f}",
            f"{curve.tokens_per_second:,.0f}",
            f"{curve.seconds:.0f}",
        )
    return result


def plot(curves: list[Curve], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 3.6), squeeze=False)
    for axis, curve in zip(axes[0], curves, strict=True):
        axis.plot(curve.losses, linewidth=1, alpha=0.7, label="training")
        axis.plot([0, len(curve.losses)], [curve.before, curve.after], "o", color="C3", label="validation")
        for x, y in (0, curve.before), (len(curve.losses), curve.after):
            axis.annotate(
                f"{y:.2f}",
                (x, y),
                textcoords="offset points",
                xytext=(0, 8),
                ha="center",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
        axis.set(title=f"{curve.name}: {' → '.join(curve.pipeline)}", xlabel="step")
        axis.margins(y=0.15)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("loss, nats per byte")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def base_memory(gpt: nn.Module, handle: tx.Handle) -> str:
    """What the frozen weights take, in the plain model and on this rank."""
    plain = sum(parameter.nbytes for parameter in gpt.parameters())
    frozen = [p for p in handle.parameters.values() if not p.requires_grad]
    held = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in frozen)
    return f"Base weights: {plain / 2**20:.2f} MiB in the plain model, {held / 2**20:.2f} MiB on each rank"
