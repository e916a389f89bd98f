"""Which linear layers get an adapter."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import thunder_xform as tx
from thunder_xform_lora.options import ALL_LINEAR, Options

Pattern = str | Sequence[str]


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
        targets.append(Target(weight, tuple(paths), layer.out_features, layer.in_features, r, scaling))
    return tuple(targets)


def matches(pattern: Pattern, path: str) -> bool:
    """Whether a module's name matches, by PEFT's rule: a text is a regular expression for the whole name, a
    list holds names and dotted suffixes.
    """
    if isinstance(pattern, str):
        return re.fullmatch(pattern, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in pattern)


def _select(options: Options, ctx: tx.Context) -> dict[str, torch.nn.Linear]:
    modules = dict(ctx.module.named_modules(remove_duplicate=False))
    wanted, excluded = options.target_modules, options.exclude_modules or ()
    if isinstance(wanted, str) and wanted.lower() == ALL_LINEAR:
        head = _output_layer(ctx.module)
        found = [p for p, m in modules.items() if isinstance(m, torch.nn.Linear) and m is not head]
        if not found:
            problem = f"{type(ctx.module).__name__} has no torch.nn.Linear that could get an adapter."
            raise _error(ctx, "target_modules", wanted, problem, "Leave out 'lora'.")
    else:
        _check_patterns("target_modules", wanted, modules, ctx)
        found = [p for p in modules if matches(wanted, p)]
    _check_patterns("exclude_modules", excluded, modules, ctx)
    kept = [p for p in found if not matches(excluded, p)] if excluded else found
    if not kept:
        raise _error(
            ctx,
            "exclude_modules",
            excluded,
            f"`exclude_modules` {excluded!r} leaves nothing of `target_modules` {wanted!r}.",
            "Exclude less.",
        )
    return {path: _linear(path, modules[path], wanted, ctx) for path in kept}


def _output_layer(module: torch.nn.Module) -> torch.nn.Module | None:
    """The output layer of a language model that names one, as models of transformers do."""
    getter = getattr(module, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def _check_patterns(option: str, pattern: Pattern, modules: dict[str, torch.nn.Module], ctx: tx.Context) -> None:
    """Refuse a pattern that matches no module at all: it is most likely misspelt."""
    for part in [pattern] if isinstance(pattern, str) else [(name,) for name in pattern]:
        if not any(matches(part, path) for path in modules):
            text = part if isinstance(part, str) else part[0]
            raise _error(
                ctx,
                option,
                text,
                f"`{option}` {text!r} matches no module of {type(ctx.module).__name__}.",
                f"Closest names: {', '.join(map(repr, _closest(text, modules)))}.",
            )


def _closest(text: str, modules: dict[str, torch.nn.Module]) -> list[str]:
    """Last components and full names of linear layers that resemble ``text``."""
    paths = [path for path, module in modules.items() if isinstance(module, torch.nn.Linear)]
    names = dict.fromkeys([ALL_LINEAR, *(path.rpartition(".")[2] for path in paths), *paths])
    return difflib.get_close_matches(text, names, n=5, cutoff=0.5) or list(names)[:5]


def _linear(path: str, module: torch.nn.Module, wanted: Pattern, ctx: tx.Context) -> torch.nn.Linear:
    if isinstance(module, torch.nn.Linear):
        return module
    raise _error(
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
        raise _error(
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
        raise _error(
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
            raise _error(
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


def _error(ctx: tx.Context, option: str, value: object, problem: str, remedy: str) -> tx.errors.OptionError:
    return tx.errors.OptionError(
        problem, remedy, plugin=ctx.plugin, distribution=ctx.distribution, option=option, value=repr(value)
    )
