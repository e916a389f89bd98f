"""Which linear layers get an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import thunder_xform as tx
from thunder_xform_lora._patterns import Pattern, check_patterns, error, inside_saved, matches, resembling, targeted
from thunder_xform_lora.options import ALL_LINEAR, Options, fits


@dataclass(frozen=True, slots=True)
class Target:
    """One weight that gets an adapter.

    Attributes:
        weight: the weight's name in the parameter ledger.
        modules: names of all layers that use it, several where layers are tied; the first names the adapter.
        out_features, in_features: the weight's logical shape.
        r: rank of the adapter.
        scaling: factor of the adapter's output.
    """

    weight: str
    modules: tuple[str, ...]
    out_features: int
    in_features: int
    r: int
    scaling: float


def find_targets(options: Options, params: tx.Parameters, ctx: tx.Context) -> tuple[Target, ...]:
    """The targets in module order. Nothing is changed.

    Raises:
        OptionError: a pattern matches nothing, or something that cannot get an adapter of this rank.
    """
    selected = _select(options, ctx)
    by_weight: dict[str, list[str]] = {}
    for path, layer in selected.items():
        by_weight.setdefault(_weight_of(path, layer, params, ctx), []).append(path)
    targets = []
    for weight, paths in by_weight.items():
        layer = selected[paths[0]]
        r, scaling = options.rank_of(paths[0]), options.scaling_of(paths[0])
        _check_rank(r, paths[0], layer, ctx)
        _check_ties(weight, paths, params, ctx)
        if unlike := [p for p in paths if (options.rank_of(p), options.scaling_of(p)) != (r, scaling)]:
            problem = f"{paths[0]!r} and {unlike[0]!r} share one weight and adapter, but not the rank or scaling."
            raise error(ctx, "rank_pattern", options.rank_pattern, problem, "Give both the same.")
        targets.append(Target(weight, tuple(paths), layer.out_features, layer.in_features, r, scaling))
    return tuple(targets)


def _select(options: Options, ctx: tx.Context) -> dict[str, torch.nn.Linear]:
    modules = dict(ctx.module.named_modules(remove_duplicate=False))
    wanted, excluded = options.target_modules, options.exclude_modules or ()
    if isinstance(wanted, str) and wanted.lower() == ALL_LINEAR:
        head = _output_layer(ctx.module)
        found = [p for p, m in modules.items() if isinstance(m, torch.nn.Linear) and m is not head]
        if not found:
            problem = f"{type(ctx.module).__name__} has no torch.nn.Linear that could get an adapter."
            raise error(ctx, "target_modules", wanted, problem, "Leave out 'lora'.")
    else:
        check_patterns("target_modules", wanted, modules, ctx)
        found = [p for p in modules if targeted(options, p)]
    check_patterns("exclude_modules", excluded, modules, ctx)
    kept = [p for p in found if not inside_saved(options, p) and not (excluded and matches(excluded, p))]
    if not found:
        raise error(
            ctx,
            "layers_to_transform",
            options.layers_to_transform,
            f"No module that `target_modules` {wanted!r} names is in a layer of `layers_to_transform` "
            f"{options.layers_to_transform!r} (`layers_pattern` {options.layers_pattern!r}).",
            "Give indices that the stack has, counted from 0, and the stack's own name.",
        )
    if not kept:
        raise error(
            ctx,
            "exclude_modules",
            excluded,
            f"`exclude_modules` {excluded!r} leaves nothing of `target_modules` {wanted!r}"
            f"{f' with `modules_to_save` {options.modules_to_save!r}' if options.modules_to_save else ''}.",
            "Exclude less.",
        )
    _check_settings(options, kept, ctx)
    return {path: _linear(path, modules[path], wanted, ctx) for path in kept}


def _check_settings(options: Options, paths: Sequence[str], ctx: tx.Context) -> None:
    """Refuse a rank or scaling for a layer that has no adapter."""
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(options, option):
            if not any(fits(pattern, path) for path in paths):
                raise error(
                    ctx,
                    option,
                    pattern,
                    f"`{option}` {pattern!r} is for none of the {len(paths)} layers with adapters.",
                    f"Closest names: {', '.join(map(repr, resembling(pattern, paths)))}.",
                )


def _output_layer(module: torch.nn.Module) -> torch.nn.Module | None:
    """The output layer of a language model that names one, as models of transformers do."""
    getter = getattr(module, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def _linear(path: str, module: torch.nn.Module, wanted: Pattern, ctx: tx.Context) -> torch.nn.Linear:
    if isinstance(module, torch.nn.Linear):
        return module
    raise error(
        ctx,
        "target_modules",
        wanted,
        f"`target_modules` {wanted!r} matches {path!r} of type {type(module).__name__}, but only "
        f"torch.nn.Linear is supported.",
        f"Name linear layers only, or exclude it with exclude_modules=[{path!r}].",
    )


def _weight_of(path: str, layer: torch.nn.Linear, params: tx.Parameters, ctx: tx.Context) -> str:
    name = f"{path}.weight" if path else "weight"
    shape = (layer.out_features, layer.in_features)
    if name not in params or params.version(name).shape != shape:
        found = f"is {params.version(name).shape}" if name in params else "is computed from other parameters"
        raise error(
            ctx,
            "target_modules",
            path,
            f"The weight of {path!r} {found} and not a parameter of shape {shape}, as an adapter needs.",
            f"Exclude it with exclude_modules=[{path!r}].",
        )
    return params.canonical(name)


def _check_rank(r: int, path: str, layer: torch.nn.Linear, ctx: tx.Context) -> None:
    largest = min(layer.out_features, layer.in_features)
    if r > largest:
        raise error(
            ctx,
            "r",
            r,
            f"`r` is {r}, larger than {path!r}, which maps {layer.in_features} to {layer.out_features} features.",
            f"Lower `r` to {largest} or exclude the layer with exclude_modules=[{path!r}].",
        )


def _check_ties(weight: str, paths: list[str], params: tx.Parameters, ctx: tx.Context) -> None:
    """Refuse to adapt one of two linear layers that share a weight.

    A compiled linear operation knows its weight, not the layer it came from.
    """
    for path in _other_owners(weight, paths, params):
        if isinstance(ctx.module.get_submodule(path), torch.nn.Linear):
            raise error(
                ctx,
                "target_modules",
                path,
                f"{paths[0]!r} and {path!r} share one weight, but only {paths[0]!r} is to get an adapter.",
                "Target both or neither.",
            )


def _other_owners(weight: str, paths: Sequence[str], params: tx.Parameters | tx.Context) -> Iterator[str]:
    owners = (name.rpartition(".")[0] for name in params.aliases(weight))
    return (path for path in owners if path not in paths)


def tied_elsewhere(target: Target, ctx: tx.Context) -> tuple[str, ...]:
    """Modules that share the weight without its adapter, such as a tied embedding."""
    return tuple(_other_owners(target.weight, target.modules, ctx))
