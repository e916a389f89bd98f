"""What is known of the operators of a computation beyond the trace itself.

Thunder's proxies and bound symbols carry tags, but every rewrite makes new ones. So what must outlive a rewrite is
noted here, by the name of an operator's outputs, and handed on to whatever takes the operator's place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thunder.core.symbol import BoundSymbol

#: Who put an operator there: the model itself, for those that no plugin inserted.
MODEL = ""


class Notes:
    """Owner, module and memory policy of operators, by the names of their outputs.

    Attributes:
        owners: the plugin that put an operator there; the model's are not listed.
        modules: the dotted path of the module that wrote it, and which of its calls it was.
        policies: ``"save"`` or ``"recompute"``, where someone asked for one.
        same: for an operator called again as it is, the output that it had before, as of the current plugin.
        places: for an operator put in place of another one, the name of that one, as of the current plugin.
        wishes: examples of what the current plugin asked of the backward.
    """

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}
        self.modules: dict[str, tuple[str, int]] = {}
        self.policies: dict[str, str] = {}
        self.same: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.wishes: list[str] = []

    def copy(self) -> Notes:
        """Independent notes for the next edit."""
        made = Notes()
        for name, value in vars(self).items():
            setattr(made, name, value.copy())
        return made

    def advance(self) -> None:
        """Forget what concerns one plugin's edits only."""
        self.same, self.places, self.wishes = {}, {}, []

    def owner(self, bsym: BoundSymbol) -> str:
        return next((self.owners[o.name] for o in bsym.flat_proxy_outs if o.name in self.owners), MODEL)

    def module(self, bsym: BoundSymbol) -> tuple[str, int] | None:
        return next((self.modules[o.name] for o in bsym.flat_proxy_outs if o.name in self.modules), None)

    def policy(self, bsym: BoundSymbol) -> str | None:
        return next((self.policies[o.name] for o in bsym.flat_proxy_outs if o.name in self.policies), None)

    def ask(self, bsym: BoundSymbol, policy: str) -> None:
        """Note what the current plugin wants the backward to do with the outputs of ``bsym``."""
        verb = {"recompute": "recomputes", "save": "saves"}[policy]
        self.wishes.append(f"{verb} {bsym.sym.name!r} {'in' if policy == 'recompute' else 'for'} the backward")
        self.policies |= dict.fromkeys((o.name for o in bsym.flat_proxy_outs), policy)

    def called_again(self, old: BoundSymbol, output: Any) -> None:
        """``output`` comes from another call of the operator that ``old`` is a call of."""
        owner = self.owner(old)
        for before, after in zip(old.flat_proxy_outs, _proxies(output), strict=False):
            self.owners[after.name] = owner
            self.same[after.name] = self.same.get(before.name, before.name)

    def inserted(self, bsyms: Iterable[BoundSymbol], plugin: str) -> None:
        """``plugin`` inserted ``bsyms``."""
        for bsym in bsyms:
            for output in bsym.flat_proxy_outs:
                self.owners.setdefault(output.name, plugin)

    def replaced(self, old: BoundSymbol, bsyms: Iterable[BoundSymbol]) -> None:
        """``bsyms`` take the place of ``old``: what was noted of it holds for them."""
        module, policy = self.module(old), self.policy(old)
        first = next((o.name for o in old.flat_proxy_outs), "")
        place = self.places.get(first, old.sym.name)
        for bsym in bsyms:
            for output in bsym.flat_proxy_outs:
                self.places[output.name] = place
                if module is not None:
                    self.modules.setdefault(output.name, module)
                if policy is not None:
                    self.policies.setdefault(output.name, policy)


def _proxies(output: Any) -> list[Any]:
    from thunder.core.proxies import Proxy
    from thunder.core.pytree import tree_flatten

    return [p for p in tree_flatten(output)[0] if isinstance(p, Proxy)]
