"""Which weights are packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import thunder_xform as tx
from thunder_xform.patterns import check, matches
from thunder_xform_quant.options import ALL_LINEAR, SKIPPED, Options


def find_weights(options: Options, params: tx.Parameters, ctx: tx.Context) -> tuple[str, ...]:
    """Names of the weights to pack, tied ones once, in module order. Nothing is changed.

    A weight that something else than linear layers shares, such as an embedding, is left alone under
    ``"all-linear"``.

    Raises:
        OptionError: a pattern matches nothing, or something that cannot be packed.
    """
    chosen = _select(options, ctx)
    by_weight: dict[str, list[str]] = {}
    for path in chosen:
        by_weight.setdefault(_weight_of(path, params, ctx), []).append(path)
    wanted = options.target_modules
    for weight, paths in list(by_weight.items()):
        for other in _other_owners(weight, paths, params):
            if wanted == ALL_LINEAR and not isinstance(ctx.module.get_submodule(other), torch.nn.Linear):
                by_weight.pop(weight, None)
                continue
            raise ctx.option_error(
                "target_modules",
                wanted,
                f"{paths[0]!r} and {other!r} share one weight, but only {paths[0]!r} is to be quantized.",
                "Target both or neither; embeddings stay as they are.",
            )
    for weight in by_weight:
        _check_values(weight, params, ctx)
    return tuple(by_weight)


def _select(options: Options, ctx: tx.Context) -> list[str]:
    """Names of the linear layers chosen by the options."""
    modules = dict(ctx.module.named_modules(remove_duplicate=False))
    linear = {path: module for path, module in modules.items() if isinstance(module, torch.nn.Linear)}
    wanted, excluded = options.target_modules, options.exclude_modules or ()
    if excluded != SKIPPED:
        check("exclude_modules", excluded, [ALL_LINEAR, *linear], ctx)
    if wanted == ALL_LINEAR:
        getter = getattr(ctx.module, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        found = [path for path, module in linear.items() if module is not head]
    else:
        check("target_modules", wanted, [ALL_LINEAR, *linear], ctx)
        found = [path for path in modules if matches(wanted, path)]
    kept = [path for path in found if not matches(excluded, path)]
    if not kept:
        problem = f"{type(ctx.module).__name__} has no torch.nn.Linear that `target_modules` {wanted!r}"
        problem += f" and `exclude_modules` {excluded!r} choose."
        raise ctx.option_error("target_modules", wanted, problem, "Choose others, or leave out 'quant'.")
    for path in kept:
        if path not in linear:
            raise ctx.option_error(
                "target_modules",
                wanted,
                f"`target_modules` {wanted!r} matches {path!r} of type {type(modules[path]).__name__}, but only "
                f"torch.nn.Linear is supported.",
                f"Name linear layers only, or exclude it with exclude_modules=[{path!r}].",
            )
    return kept


def _weight_of(path: str, params: tx.Parameters, ctx: tx.Context) -> str:
    name = f"{path}.weight" if path else "weight"
    if name not in params or params.version(name).kind != "parameter":
        problem = f"The weight of {path!r} is no parameter, but computed from others."
        raise ctx.option_error("target_modules", path, problem, f"Set exclude_modules=[{path!r}].")
    return params.canonical(name)


def _check_values(name: str, params: tx.Parameters, ctx: tx.Context) -> None:
    tensor, version = params.tensor(name), params.version(name)
    if version.layout != "dense" or not tensor.is_floating_point() or tensor.ndim != 2:
        raise tx.errors.PipelineError(
            f"Plugin {ctx.plugin!r} cannot quantize {name!r}: it is {tuple(tensor.shape)} {tensor.dtype}, layout "
            f"{version.layout!r}.",
            "Exclude its layer; only dense floating-point matrices are quantized.",
            name=name,
        )
    if tensor.is_meta:
        raise tx.errors.PipelineError(
            f"Plugin {ctx.plugin!r} cannot quantize {name!r}, which has no data (device meta).",
            "Materialize the model first.",
            name=name,
        )
    if not bool(tensor.isfinite().all()):
        raise tx.errors.PipelineError(
            f"Plugin {ctx.plugin!r} cannot quantize {name!r}: it has entries that are infinite or NaN.",
            "Correct the checkpoint, or exclude its layer.",
            name=name,
        )


def _other_owners(weight: str, paths: Sequence[str], params: tx.Parameters) -> list[str]:
    owners = (name.rpartition(".")[0] for name in params.aliases(weight))
    return [path for path in owners if path not in paths]
