"""Observers that come with the package: where compile time goes, and what each hook did to the traces."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thunder_xform.context import Context
from thunder_xform.errors import PipelineError
from thunder_xform.hookspecs import hookimpl

_HEADER = "# thunder-xform trace: "
_Wrapped = Generator[None, Any, Any]


class Timing:
    """Records the seconds that each ``plugin.hook`` takes in the ``seconds`` of the compilation it belongs to.

    Part of every pipeline. The time of ``update_model_state`` goes to the first compilation.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, float] = {}

    @hookimpl(wrapper=True)
    def update_model_state(self, ctx: Context) -> _Wrapped:
        return (yield from self._timed("update_model_state", ctx))

    @hookimpl(wrapper=True)
    def mutate_prologue(self, ctx: Context) -> _Wrapped:
        return (yield from self._timed("mutate_prologue", ctx))

    @hookimpl(wrapper=True)
    def before_autograd(self, ctx: Context) -> _Wrapped:
        return (yield from self._timed("before_autograd", ctx))

    @hookimpl(wrapper=True)
    def after_optimization(self, ctx: Context) -> _Wrapped:
        return (yield from self._timed("after_optimization", ctx))

    def _timed(self, hook: str, ctx: Context) -> _Wrapped:
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            seconds = self._waiting
            if ctx.event is not None:
                seconds = ctx.event.seconds
                seconds.update(self._waiting)
                self._waiting = {}
            name = f"{ctx.plugin}.{hook}"
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


class TraceDump:
    """Writes what hooks did to traces into a folder, to be read and compared with ``diff -r``.

    For the first compilation into ``FOLDER/compilation_0``, and so on: for each hook that changed its trace,
    in the order in which they ran, ``NN_plugin.hook.before.py`` and ``NN_plugin.hook.py``; with several
    ranks, below ``FOLDER/rank_N``. The text depends on nothing but the program: no addresses, times or
    folders of installed code.

    Args:
        folder: made if it does not exist. Dumps of earlier runs in it are removed.

    Raises:
        PipelineError: the folder holds anything but dumps.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._cleaned = False
        self._number = -1
        self._written = 0
        foreign = next(_foreign(self.folder), None)
        if foreign is not None:
            raise PipelineError(
                f"{self.folder} holds {foreign.relative_to(self.folder.parent)}, which is no trace dump.",
                "Choose an empty folder, or one that does not exist yet.",
                folder=str(self.folder),
            )

    @hookimpl(wrapper=True)
    def mutate_prologue(self, prologue: Any, ctx: Context) -> _Wrapped:
        return (yield from self._compared("mutate_prologue", prologue, ctx))

    @hookimpl(wrapper=True)
    def before_autograd(self, computation: Any, ctx: Context) -> _Wrapped:
        return (yield from self._compared("before_autograd", computation, ctx))

    @hookimpl(wrapper=True)
    def after_optimization(self, schedule: Any, ctx: Context) -> _Wrapped:
        return (yield from self._compared(f"after_optimization.{schedule.phase}", schedule, ctx))

    def _compared(self, hook: str, view: Any, ctx: Context) -> _Wrapped:
        self._clean()
        before = _normal(str(view))
        returned = yield
        after = before if returned is None else _normal(str(returned))
        if before != after and ctx.event is not None:
            self._write(ctx.event.number, f"{ctx.plugin}.{hook}", before, after)
        return returned

    def _root(self) -> Path:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return self.folder / f"rank_{dist.get_rank()}" if several else self.folder

    def _clean(self) -> None:
        if not self._cleaned:
            for old in self._root().glob("compilation_*"):
                shutil.rmtree(old)
            self._cleaned = True

    def _write(self, number: int, name: str, before: str, after: str) -> None:
        if number != self._number:
            self._number, self._written = number, 0
        folder = self._root() / f"compilation_{number}"
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self._written:02d}_{name}"
        self._written += 1
        for suffix, text in ((".before", before), ("", after)):
            head = f"{_HEADER}{name}{suffix}\n"
            (folder / f"{stem}{suffix}.py").write_text(head + text, encoding="utf-8")


def _foreign(folder: Path) -> Iterator[Path]:
    """Whatever is in ``folder`` that a dump did not write."""
    for path in sorted(folder.rglob("*")) if folder.exists() else ():
        if path.is_dir() and re.fullmatch(r"(rank|compilation)_\d+", path.name):
            continue
        if path.is_file() and path.suffix == ".py" and path.parent.name.startswith("compilation_"):
            with path.open(encoding="utf-8", errors="replace") as file:
                if file.readline().startswith(_HEADER):
                    continue
        yield path


def _normal(text: str) -> str:
    text = re.sub(r"^# Constructed by .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"(# )\S*[/\\]([^/\\\s]+:\d+:)", r"\1\2", text)
    return re.sub(r"\b0x[0-9a-f]+\b", "0x...", text).rstrip() + "\n"
