"""``thunder-xform doctor MODULE:FACTORY``: a model of the user's, once, against eager PyTorch."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from thunder_xform import registry
from thunder_xform.errors import PipelineError

__all__ = ["check_model"]

_NAME_IT = "Name it as MODULE:FUNCTION, from a folder where `python -c 'import MODULE'` works."


def check_model(
    target: str, request: Iterable[str], edges: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, bool, str]]:
    """Compare a model, transformed, with itself in eager PyTorch: in training, and evaluated without gradients.

    Under torchrun the ranks make a process group and check together.

    Args:
        target: ``module:factory``. The factory is called without arguments and returns the model and its arguments:
            a tensor, a tuple of positional or a dictionary of keyword arguments. The working folder is importable.
        request: what to resolve.
        edges: order beyond what plugins declare.

    Yields:
        What was checked, whether it equals eager PyTorch, and the report.

    Raises:
        XformError: there is no such factory, the pipeline cannot be had, or a value departs.
    """
    with _process_group():
        model, args, kwargs = _made(target)
        pipeline = registry.resolve(list(request), edges=edges, check="eager")
        compiled = importlib.import_module("thunder").jit(model, transforms=pipeline)
        handle = importlib.import_module("thunder_xform").handle(compiled)
        for mode in ("train", "eval"):
            getattr(compiled, mode)()
            first = len(handle.events)
            with _gradients(mode == "train"), warnings.catch_warnings(action="ignore"):
                compiled(*args, **kwargs)
            report = "; ".join(event.check for event in handle.events[first:]) or "runs code that was compared already"
            yield mode, "not compared" not in report, report


def _made(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    name, _, path = target.partition(":")
    if not path:
        raise PipelineError(f"{target!r} names no function of a module.", _NAME_IT)
    sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(name)
        for part in path.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise PipelineError(f"{target!r} leads to no factory ({type(error).__name__}: {error}).", _NAME_IT) from error
    finally:
        sys.path.remove(os.getcwd())
    made = factory()
    torch = importlib.import_module("torch")
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise PipelineError(
            f"{target!r} returned {_kinds(made)}.",
            "Return the model and its arguments: `return model, (input,)`, or a dictionary of keyword arguments.",
        )
    model, given = made
    if isinstance(given, dict):
        return model, (), given
    return model, given if isinstance(given, tuple) else (given,), {}


def _kinds(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"an object of type {type(made).__name__}"


@contextmanager
def _process_group() -> Iterator[None]:
    """One over all ranks, where torchrun started this process."""
    distributed: Any = importlib.import_module("torch.distributed")
    torch: Any = importlib.import_module("torch")
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group()
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def _gradients(enabled: bool) -> Iterator[None]:
    with importlib.import_module("torch").set_grad_enabled(enabled):
        yield
