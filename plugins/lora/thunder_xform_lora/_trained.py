"""Parameters of the model that train along with an adapter: biases, and modules that are saved whole.

The compiled model reads a trainable copy in place of each; the model's own tensor stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

import thunder_xform as tx
from thunder_xform.patterns import resembling
from thunder_xform_lora._patterns import to_save
from thunder_xform_lora._target import Target
from thunder_xform_lora.options import Options


@dataclass(frozen=True, slots=True)
class Trained:
    """One parameter of the model that trains along with an adapter.

    Attributes:
        source: its name in the parameter ledger.
        keys: what PEFT calls it in files, once for each name that it has in the model.
        name: of the adapter's copy.
    """

    source: str
    keys: tuple[str, ...]
    name: str


def find_trained(
    adapter: str, options: Options, targets: Iterable[Target], params: tx.Parameters, ctx: tx.Context
) -> tuple[Trained, ...]:
    """What trains under ``bias`` and ``modules_to_save``. Nothing is changed.

    Raises:
        OptionError: a name matches nothing, or something that cannot be copied.
    """
    saved = _saved_modules(options, ctx)
    adapted = {path for target in targets for path in target.modules}
    found: dict[str, Trained] = {}
    for name in params:
        if params.version(name).origin != "model":
            continue
        owners = {alias: _owner(alias, saved) for alias in params.aliases(name)}
        if any(owner is not None for owner in owners.values()):
            _check_copied(name, owners, params, ctx)
            module = owners[name] or ""
            inner = name.removeprefix(f"{module}.")
            found[name] = Trained(name, tuple(owners), f"{module}.modules_to_save.{adapter}.{inner}")
        elif _is_bias(options, name, adapted):
            module = name.rpartition(".")[0]
            keys = [_bias_key(alias, adapted) for alias in params.aliases(name)]
            found[name] = Trained(name, tuple(keys), f"{module}.lora_bias.{adapter}".removeprefix("."))
    for name in found:
        if params.tensor(name).is_meta:
            problem = f"{name!r} is to train, but is on the meta device and has no data to start from."
            option = "modules_to_save" if saved else "bias"
            raise ctx.option_error(option, getattr(options, option), problem, "Load the model's weights first.")
    return tuple(found.values())


def _saved_modules(options: Options, ctx: tx.Context) -> tuple[str, ...]:
    modules = dict(ctx.module.named_modules(remove_duplicate=False))
    for name in options.modules_to_save or ():
        if not any(path.endswith(name) for path in modules if path):
            problem = f"`modules_to_save` {name!r} matches no module of {type(ctx.module).__name__}."
            told = ", ".join(map(repr, resembling(name, [path for path in modules if path])))
            raise ctx.option_error("modules_to_save", name, problem, f"Closest names: {told}.")
    found = [path for path in modules if path and to_save(options, path)]
    for path in found:
        if buffers := [name for name, _ in modules[path].named_buffers()]:
            problem = f"`modules_to_save` matches {path!r}, which has the buffer {buffers[0]!r}."
            raise ctx.option_error("modules_to_save", path, problem, "Only modules without buffers can train whole.")
    return tuple(found)


def _owner(name: str, saved: Iterable[str]) -> str | None:
    """The outermost saved module that a parameter belongs to."""
    return min((path for path in saved if name.startswith(f"{path}.")), key=len, default=None)


def _check_copied(name: str, owners: dict[str, str | None], params: tx.Parameters, ctx: tx.Context) -> None:
    if outside := [alias for alias, owner in owners.items() if owner is None]:
        problem = f"`modules_to_save` covers {name!r}, which is one tensor with {outside[0]!r}, but not that."
        raise ctx.option_error(
            "modules_to_save", name, problem, "Name both modules: they train one copy; or untie them."
        )
    if (layout := params.version(name).layout) != "dense":
        problem = f"`modules_to_save` covers {name!r}, which is stored as {layout!r} and cannot train."
        raise ctx.option_error("modules_to_save", name, problem, "Leave that module out of quantization.")


def _is_bias(options: Options, name: str, adapted: Iterable[str]) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" and (options.bias == "all" or (options.bias == "lora_only" and module in adapted))


def _bias_key(name: str, adapted: Iterable[str]) -> str:
    """PEFT puts a layer that it adapts into another, as ``base_layer``."""
    module = name.rpartition(".")[0]
    return f"{module}.base_layer.bias" if module in adapted else name


#: ``stand_in(own, copy) -> copy``. It reads the model's own tensor, too, so that this stays an input of the computation
#: that whoever stores it otherwise can restore.
_stand_in = tx.operator(
    "lora_stand_in",
    meta=lambda own, copy: tx.tensor_like(copy),
    fn=lambda own, copy: copy,
    backward=lambda inputs, outputs, gradients: (None, gradients[0]),
)


def _read_copy(own: object, copy: object) -> tuple[object, None]:
    return _stand_in(own, copy), None


def add_copies(trained: Iterable[Trained], params: tx.Parameters) -> None:
    """Add the trainable copies of an adapter."""
    for each in trained:
        params.add(each.name, params.tensor(each.source).detach().clone())


def read_copies(trained: Iterable[Trained], computation: tx.Computation) -> tx.Computation:
    """Let everything read the copies."""
    read = set(computation.parameters)
    groups = [((each.source, each.name), _read_copy) for each in trained if each.source in read]
    return computation.restore(groups) if groups else computation


def export_copies(trained: Iterable[Trained], state: dict[str, torch.Tensor]) -> None:
    """Put an adapter's copies in the place of what they are copies of."""
    for each in trained:
        state[each.source] = state[each.name]
