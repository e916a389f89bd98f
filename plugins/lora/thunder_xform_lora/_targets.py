"""Which layers get an adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import thunder_xform as tx
from thunder_xform.patterns import Pattern, check, matches, resembling
from thunder_xform_lora._kinds import SUPPORTED, is_linear, layer_of
from thunder_xform_lora._layer import Layer
from thunder_xform_lora._patterns import inside_saved, targeted
from thunder_xform_lora._target import Target, other_owners
from thunder_xform_lora.options import ALL_LINEAR, Options, fits


def find_targets(adapter: str, options: Options, params: tx.Parameters, ctx: tx.Context) -> tuple[Target, ...]:
    """The targets of an adapter in module order. Nothing is changed.

    Raises:
        OptionError: a pattern matches nothing, or something that cannot get an adapter of this rank.
    """
    selected = _select(options, ctx)
    tied: dict[tuple[type[Layer], str], list[str]] = {}
    for path, layer in selected.items():
        tied.setdefault((type(layer), _weight_of(path, layer, params, ctx)), []).append(path)
    targets = []
    for (_, weight), paths in tied.items():
        r, scaling = options.rank_of(paths[0]), options.scaling_of(paths[0])
        target = Target(adapter, options, weight, tuple(paths), selected[paths[0]], r, scaling)
        for path in paths:
            _check_layer(r, path, selected[path], options, ctx)
        _check_ties(target, params, ctx)
        if unlike := [p for p in paths if (options.rank_of(p), options.scaling_of(p)) != (r, scaling)]:
            problem = f"{paths[0]!r} and {unlike[0]!r} share one weight and adapter, but not the rank or scaling."
            raise ctx.option_error("rank_pattern", options.rank_pattern, problem, "Give both the same.")
        targets.append(target)
    return tuple(targets)


def _select(options: Options, ctx: tx.Context) -> dict[str, Layer]:
    modules = dict(ctx.module.named_modules(remove_duplicate=False))
    wanted, excluded = options.target_modules, options.exclude_modules or ()
    known = [ALL_LINEAR, *(path for path, module in modules.items() if layer_of(module))]
    if isinstance(wanted, str) and wanted.lower() == ALL_LINEAR:
        head = _output_layer(ctx.module)
        found = [p for p, m in modules.items() if is_linear(m) and m is not head]
        if not found:
            problem = f"{type(ctx.module).__name__} has no torch.nn.Linear that could get an adapter."
            raise ctx.option_error("target_modules", wanted, problem, "Leave out 'lora'.")
    else:
        check("target_modules", wanted, known, ctx)
        found = [p for p in modules if targeted(options, p)]
    check("exclude_modules", excluded, known, ctx)
    kept = [p for p in found if not inside_saved(options, p) and not (excluded and matches(excluded, p))]
    if not found:
        raise ctx.option_error(
            "layers_to_transform",
            options.layers_to_transform,
            f"No module that `target_modules` {wanted!r} names is in a layer of `layers_to_transform` "
            f"{options.layers_to_transform!r} (`layers_pattern` {options.layers_pattern!r}).",
            "Give indices that the stack has, counted from 0, and the stack's own name.",
        )
    if not kept:
        raise ctx.option_error(
            "exclude_modules",
            excluded,
            f"`exclude_modules` {excluded!r} leaves nothing of `target_modules` {wanted!r}"
            f"{f' with `modules_to_save` {options.modules_to_save!r}' if options.modules_to_save else ''}.",
            "Exclude less.",
        )
    _check_settings(options, kept, ctx)
    return {path: _layer(path, modules[path], wanted, ctx) for path in kept}


def _check_settings(options: Options, paths: Sequence[str], ctx: tx.Context) -> None:
    """Refuse a rank or scaling for a layer that has no adapter."""
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(options, option):
            if not any(fits(pattern, path) for path in paths):
                raise ctx.option_error(
                    option,
                    pattern,
                    f"`{option}` {pattern!r} is for none of the {len(paths)} layers with adapters.",
                    f"Closest names: {', '.join(map(repr, resembling(pattern, paths)))}.",
                )


def _output_layer(module: torch.nn.Module) -> torch.nn.Module | None:
    """The output layer of a language model that names one, as models of transformers do."""
    getter = getattr(module, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def _layer(path: str, module: torch.nn.Module, wanted: Pattern, ctx: tx.Context) -> Layer:
    if layer := layer_of(module):
        return layer
    raise ctx.option_error(
        "target_modules",
        wanted,
        f"`target_modules` {wanted!r} matches {path!r} of type {type(module).__name__}, but only {SUPPORTED} can have "
        f"an adapter.",
        f"Name such layers only, or exclude it with exclude_modules=[{path!r}].",
    )


def _weight_of(path: str, layer: Layer, params: tx.Parameters, ctx: tx.Context) -> str:
    name = f"{path}.weight" if path else "weight"
    if name not in params or params.version(name).shape != layer.shape:
        found = f"is {params.version(name).shape}" if name in params else "is computed from other parameters"
        raise ctx.option_error(
            "target_modules",
            path,
            f"The weight of {path!r} {found} and not a parameter of shape {layer.shape}, as an adapter needs.",
            f"Exclude it with exclude_modules=[{path!r}].",
        )
    return params.canonical(name)


def _check_layer(r: int, path: str, layer: Layer, options: Options, ctx: tx.Context) -> None:
    """Refuse a layer that cannot have such an adapter."""
    if r > (largest := layer.largest_rank) and layer.linear and options.init_lora_weights == "pissa":
        raise ctx.option_error(
            "r",
            r,
            f"`r` is {r}, but {path!r} maps {layer.in_features} to {layer.out_features} features, and its weight has "
            f"no more than {largest} principal components.",
            f"Lower `r` to {largest} or exclude the layer with exclude_modules=[{path!r}].",
        )
    if reason := layer.refusal(r, options):
        raise ctx.option_error(
            "target_modules", path, f"{path!r} {reason}.", f"Exclude it with exclude_modules=[{path!r}]."
        )


def _check_ties(target: Target, params: tx.Parameters, ctx: tx.Context) -> None:
    """Refuse to adapt one of two layers of a kind that share a weight.

    A compiled operation knows its weight, not the layer it came from.
    """
    for path in other_owners(target.weight, target.modules, params):
        if type(layer_of(ctx.module.get_submodule(path))) is type(target.layer):
            raise ctx.option_error(
                "target_modules",
                path,
                f"{target.modules[0]!r} and {path!r} share one weight, but only {target.modules[0]!r} is to get an "
                f"adapter.",
                "Target both or neither.",
            )
