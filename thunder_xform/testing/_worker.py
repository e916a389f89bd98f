"""What runs in the processes of a :class:`thunder_xform.testing.RankPool`."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import itertools
import os
import pickle
import signal
import socket
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

READY, RETURNED, RAISED = "ready", "returned", "raised"


def serve(
    connection: Connection,
    rank: int,
    store: str,
    world_size: int,
    timeout: float,
    stacks: str,
    preload: Sequence[str],
) -> None:
    """Join the process group, then call whatever functions arrive until the connection closes.

    Args:
        connection: ``(pickled (fn, args, kwargs), sources of modules)`` in, ``(kind, payload)`` out.
        rank: this process's rank.
        store: URL of the file through which the ranks find each other.
        world_size: number of ranks.
        timeout: seconds after which the pool gives up on a call; collectives wait longer, so that it is the
            pool that notices a hang and reports what every rank was doing.
        stacks: file to which SIGUSR1, and a crash, write the stacks of all threads.
        preload: modules to import before joining.
    """
    with open(stacks, "w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        try:
            for name in preload:
                importlib.import_module(name)
            _join(rank, store, world_size, timeout)
            connection.send((READY, None))
        except Exception:
            connection.send((RAISED, traceback.format_exc()))
            return
        while True:
            try:
                call, sources = connection.recv()
            except EOFError:
                break
            connection.send(_answer(call, sources))
        os._exit(0)  # The others may be gone already: no orderly farewell of the process group.


def _join(rank: int, store: str, world_size: int, timeout: float) -> None:
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout + 600)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=wait)


def _answer(call: bytes, sources: Mapping[str, str]) -> tuple[str, Any]:
    import torch

    try:
        for name, file in sources.items():
            _provide(name, file)
        torch.manual_seed(0)
        fn, args, kwargs = pickle.loads(call)
        return RETURNED, pickle.dumps(fn(*args, **kwargs))
    except BaseException:
        return RAISED, traceback.format_exc()


def _provide(name: str, file: str) -> None:
    """Make module ``name`` be the one in ``file``, also where it cannot be imported by that name."""
    found = getattr(sys.modules.get(name), "__file__", None)
    if found is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        found = spec.origin if spec is not None else None
    if found is not None and os.path.exists(found) and os.path.samefile(found, file):
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    # pickle imports the packages of a dotted name before it looks the module up.
    for parent in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
        sys.modules.setdefault(parent, types.ModuleType(parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
