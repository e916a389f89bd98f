"""Real processes for tests of distributed code, reused over many cases because starting one takes seconds.

>>> with RankPool(world_size=2) as pool:
...     losses = pool.run(train, "adamw", steps=3)       # train("adamw", steps=3) on every rank

A rank that raises, dies or hangs never hangs the test: all ranks are killed, and what each of them was
doing is in the :class:`RanksFailed` that the caller gets. The next run starts with fresh processes.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from thunder_xform.testing._worker import RAISED, serve

#: Seconds for fresh processes to import torch and Thunder and to meet, generous for a busy machine.
_START_UP = 180.0
#: Seconds that the others get to report once a rank has failed. Most wait for it in a collective in vain.
_GRACE = 3.0


class RanksFailed(Exception):
    """A run on several ranks failed.

    Attributes:
        problem: what happened, one sentence.
        reports: what each rank ended with: a traceback, its threads' stacks if it hung, or that it returned.
    """

    def __init__(self, problem: str, reports: Mapping[int, str]) -> None:
        super().__init__(problem, reports)
        self.problem = problem
        self.reports = dict(reports)

    def __str__(self) -> str:
        parts = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(self.reports.items())]
        return "\n".join([self.problem, *parts])


class RankPool:
    """A fixed number of processes with a gloo process group between them, all running the same function.

    Args:
        world_size: number of ranks.
        timeout: seconds that one :meth:`run` may take; starting the processes does not count.
        preload: modules that the processes import when they start; by default Thunder and the pipeline.

    Functions run with one torch thread and torch seeded with 0. They may make subgroups, and should leave
    nothing else behind that matters to the next one.
    """

    def __init__(
        self,
        world_size: int = 2,
        timeout: float = 120.0,
        *,
        preload: Sequence[str] = ("thunder_xform.pipeline", "thunder"),
    ) -> None:
        if world_size < 1 or timeout <= 0:
            raise ValueError(
                f"A pool of {world_size} ranks with a timeout of {timeout} s cannot run. Make both positive."
            )
        self.world_size = world_size
        self.timeout = timeout
        self._preload = tuple(preload)
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ready = False

    def __enter__(self) -> RankPool:
        self._start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and wait for all.

        Args:
            fn: a module-level function, of any module that the caller has loaded, test modules included.
            args: picklable.
            kwargs: picklable.

        Returns:
            What ``fn`` returned, by rank.

        Raises:
            RanksFailed: a rank raised, died, or was not done within the timeout.
        """
        pickler = _Pickler(buffer := io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        pickler.dump((fn, args, kwargs))
        self._start()
        try:
            if not self._ready:
                self._collect("start-up", _START_UP)
                self._ready = True
            for rank in self._ranks:
                rank.connection.send((buffer.getvalue(), pickler.sources))
            return [pickle.loads(payload) for payload in self._collect(fn.__qualname__, self.timeout)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes. A later :meth:`run` starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []
        self._ready = False
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        if not self._ranks:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
            folder = Path(self._folder.name)
            common = (f"file://{folder}/store", self.world_size, self.timeout)
            for number in range(self.world_size):
                self._ranks.append(_Rank(number, common, self._preload, folder / f"stacks.{number}"))

    def _collect(self, what: str, seconds: float) -> list[Any]:
        """Payloads of all ranks' answers, or :class:`RanksFailed`."""
        deadline = time.monotonic() + seconds
        pending = {rank.connection: number for number, rank in enumerate(self._ranks)}
        payloads: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                number = pending.pop(connection)  # type: ignore[call-overload]
                try:
                    kind, payload = self._ranks[number].connection.recv()
                except (EOFError, ConnectionError):
                    kind, payload = RAISED, self._ranks[number].epitaph()
                (failures if kind == RAISED else payloads)[number] = payload
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE)
        if not failures and not pending:
            return [payloads[number] for number in range(self.world_size)]
        reports = dict.fromkeys(payloads, "returned") | failures
        for number in pending.values():
            reports[number] = f"still running:\n{self._ranks[number].stacks()}"
        if failures:
            problem = f"{what} failed on rank {', '.join(map(str, sorted(failures)))} of {self.world_size}."
        else:
            late = ", ".join(map(str, sorted(pending.values())))
            problem = f"{what} was not done after {seconds:g} s on rank {late}."
        raise RanksFailed(problem, reports)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
    """One run on fresh processes: :meth:`RankPool.run` without keeping the pool."""
    with RankPool(world_size, timeout) as pool:
        return pool.run(fn, *args, **kwargs)


class _Pickler(pickle.Pickler):
    """Notes the files that functions and classes come from: a test module cannot be imported by its name."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.sources: dict[str, str] = {}

    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, (types.FunctionType, type)):
            source = getattr(sys.modules.get(obj.__module__), "__file__", None)
            if source is not None:
                self.sources[obj.__module__] = source


class _Rank:
    """One process, the connection to it, and the file that its stacks go to."""

    def __init__(self, rank: int, common: tuple[Any, ...], preload: tuple[str, ...], stacks: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._stacks = stacks
        self._stacks.touch()
        self.process = context.Process(
            target=serve,
            args=(theirs, rank, *common, str(stacks), preload),
            name=f"rank {rank}",
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def stacks(self) -> str:
        """Stacks of all threads, from a handler that runs even where the interpreter is stuck."""
        size = self._stacks.stat().st_size
        if self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and self._stacks.stat().st_size == size:
            time.sleep(0.05)
        time.sleep(0.05)
        return self._stacks.read_text(errors="replace")

    def epitaph(self) -> str:
        """How the process died."""
        self.process.join(5)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"died with {how}\n{self._stacks.read_text(errors='replace')}"
