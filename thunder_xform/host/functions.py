"""Jitted functions that contain transformed models.

Thunder traces such a function through the user's module, and its prologue asks ``get_thunder_module`` for the module
whose parameters to unpack. That consults a map on the function's compile data: registered there, the transformed model
hands out its own parameters, and the pipeline's stages, added to the function's transforms, edit the function's traces.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from thunder import _get_cache_info
from thunder.core import prims
from thunder.core.compile_data import _compile_data, get_compile_data
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import (
    remove_context_manager_prims_from_trace,
    wrap_return_value_together_with_arguments,
)
from thunder.core.update_aliases import insert_alias_updates
from thunder.executors import pythonex
from thunder.executors.passes import transform_for_execution

from thunder_xform.errors import PipelineError
from thunder_xform.host.untraceable import explain

_CALL = "get_computation_and_inputs"


def adopt(module: ThunderModule, session: Any) -> bool:
    """Let the compilation under way, if it is another's, use the transforms of ``module``; whether there is one."""
    data = get_compile_data()
    if data is None or data.fn is module._model:
        return False
    if data.fn is module:
        raise already_compiled(module)
    session.originals.check()
    if data not in session.adopters:
        session.watch.join()
        session.watch.install(data)
    session.adopters.add(data)
    for stage in session.stages:
        if stage not in data.transforms:
            data.transforms.append(stage)
    return True


def observe(session: Any, stage: Any, traces: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Check a function's compilation, of which ``stage`` was given ``traces``, and return what to compile.

    If nothing led to the model while it was traced, the function is traced once more, as all its later compilations
    are: what that reads and changes is seen, and what it asks of tensors gets eager PyTorch's answers.

    Raises:
        PipelineError: the plain model is no longer what it was, or the function changes the model's state.
    """
    data, _ = compilation_under_way()
    if data.fn is session.module._model:
        return traces
    session.originals.check()
    if name := min(session.assigned.changed, default=""):
        raise PipelineError(
            f"The buffer {name!r} was assigned a tensor of another shape, dtype or device than the plain model's.",
            "Call the model itself, not a jitted function that contains it, or keep the buffer's shape.",
            name=name,
        )
    if data in session.adopters:
        return traces
    session.adopters.add(data)
    if data not in session.watch.watched:
        sessions = [session, *(each.session for each in data.transforms if hasattr(each, "session"))]
        for each in dict.fromkeys(sessions):
            if each.attached and data not in each.watch.watched:
                each.watch.install(data)
        traces = _traced_again(session, stage)
    if writes := session.watch.writes:
        raise PipelineError(
            f"The function lets the plain model assign {writes[0].path!r}, past the transforms ({writes[0].place}).",
            "Compile the model, thunder.jit(model, transforms=pipeline), and call what that returns in the function.",
            name=writes[0].path,
        )
    return traces


def _traced_again(session: Any, stage: Any) -> tuple[Any, Any, Any]:
    """New traces of the call that is being compiled, as Thunder hands them to ``stage``."""
    data, statistics = compilation_under_way()
    args, kwargs = call_arguments()
    try:
        prologue, computation, epilogue = data.acquire_initial_trace(
            data.fn, args, kwargs, data, statistics, data.executors_list[0]
        )
    except Exception as error:
        explain(error, session.module._model, session.watch.refusal())
        raise
    computation = remove_context_manager_prims_from_trace(wrap_return_value_together_with_arguments(computation))
    groups = _get_cache_info().get("alias_tensor_indices", "").split("-")
    if not data.compile_options.get("skip_inplace_alias_updates", False):
        computation = insert_alias_updates(computation, [[int(i) for i in g.split(",")] for g in groups if g])
    for transform in data.transforms[: data.transforms.index(stage)]:
        prologue, computation, epilogue = transform.transform_traces_pre_prologue(
            prologue, computation, epilogue, executors_list=data.executors_list
        )
    return prologue, computation, epilogue


def already_compiled(module: ThunderModule) -> PipelineError:
    """What is wrong with a second thunder.jit."""
    return PipelineError(
        f"thunder.jit was given a {type(module._model).__name__} that a pipeline transformed already.",
        "Call what the first thunder.jit returned; for other plugins, transform the plain model with a new pipeline.",
    )


def compiles(module: ThunderModule) -> bool:
    """Whether the compilation under way is that of ``module`` itself, not of a function or another model."""
    return bool(get_compile_data().fn is module._model)


def enter(module: ThunderModule, prologue: TraceCtx) -> tuple[str, ...]:
    """Prepare the compilation of a function that contains ``module``.

    Returns the proxies of ``prologue`` that stand for it; none if this call does not use it.

    Raises:
        PipelineError: the function uses a part of the model past the model itself.
    """
    data = get_compile_data()
    parts = {id(part) for part in module._model.modules()}
    found = []
    for root, unpacked in module_roots(prologue).items():
        if unpacked is module._model:
            found.append(root)
        elif id(unpacked) in parts:
            part, whole = type(unpacked).__name__, type(module._model).__name__
            raise PipelineError(
                f"The function uses {part}, a part of the transformed {whole}.",
                "Call the model itself in the function, or reach the part through it.",
            )
    if found:
        data._thunder_module_map[id(module._model)] = module
    return tuple(found)


def compilation_under_way() -> tuple[Any, Any]:
    """Thunder's compile data and statistics (which hold the compiled entries) of what is being compiled."""
    data, statistics = _compile_data.get()
    return data, statistics


def uses_several_modules(prologue: TraceCtx) -> bool:
    """Whether ``prologue`` unpacks more than one module that is no submodule of another."""
    return sum(b.sym is prims.unpack_thunder_module for b in prologue.bound_symbols) > 1


def module_roots(prologue: TraceCtx) -> dict[str, torch.nn.Module]:
    """The user's modules whose parameters ``prologue`` unpacks, by the name of the proxy that stands for each.

    They are found by running that part of the prologue on the arguments of the call that is being compiled.
    """
    unpacks = [b for b in prologue.bound_symbols if b.sym is prims.unpack_thunder_module]
    if not unpacks:
        return {}
    wanted = {b.args[0].name for b in unpacks}
    needed: list[Any] = []
    for bsym in reversed(prologue.bound_symbols[:-1]):
        if bsym.sym.id == prims.PrimIDs.UNPACK_TRIVIAL or any(o.name in wanted for o in bsym.flat_proxy_outs):
            needed.insert(0, bsym)
            wanted |= {a.name for a in bsym.flat_proxy_args}
    partial = from_trace(prologue)
    partial.bound_symbols = needed
    partial.scopes = [partial.bound_symbols]
    with tracectx(partial):
        prims.python_return(tuple(b.args[0] for b in unpacks))
    run = transform_for_execution(partial, (pythonex.ex,)).python_callable(include_decorators=False)
    args, kwargs = call_arguments()
    modules = run(*args, **kwargs)
    return {
        b.output.name: m._model if isinstance(m, ThunderModule) else m for b, m in zip(unpacks, modules, strict=True)
    }


def call_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the jitted call being compiled, from Thunder's frame: transforms are given traces only."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == _CALL and "args" in frame.f_locals:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back
    raise PipelineError(
        "The arguments of the jitted function could not be found.",
        "This Thunder release is not supported; see `thunder-xform doctor`.",
    )
