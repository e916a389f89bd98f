"""Computation inputs, derived from the ledger.

An :class:`InputTable` knows, for one compilation and as of one plugin, which proxy stands for which parameter: the
*stored* proxy that is an input of the computation, and the *value* that the model's operators read (the same one,
until a plugin restores it from a shard or a packed weight). Closing the table over a trace writes its arguments and
flat_args; :mod:`thunder_xform.host.unpacking` writes the prologue that goes with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.devices import to_device
from thunder.core.dtypes import to_dtype, to_torch_dtype
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

from thunder_xform.errors import PipelineError
from thunder_xform.host.ledger import Ledger
from thunder_xform.host.notes import Notes
from thunder_xform.host.version import Version

_UNPACK = prims.PrimIDs.UNPACK_TRIVIAL
#: What only casts its first argument: autocast's primitive, and what plugins call.
_CASTS = (prims.PrimIDs.CONVERT_ELEMENT_TYPE, ltorch.to.id)


class InputTable:
    """Which proxies stand for which parameters, as of one plugin."""

    def __init__(
        self,
        ledger: Ledger,
        stage: int,
        plugin: str,
        stored: dict[str, TensorProxy],
        values: dict[str, TensorProxy],
        others: tuple[Any, ...],
        roots: Collection[str] | None,
        notes: Notes | None = None,
    ) -> None:
        self._ledger = ledger
        self._stage = stage
        self._plugin = plugin
        self._stored = stored
        self._values = values
        self._others = others
        #: proxies of the prologue that stand for the model; None if every module unpacked is the model
        self.roots = roots
        #: what is known of operators: who put them there, what the backward does with them
        self.notes = notes or Notes()
        self._names = {proxy.name: name for proxies in (values, stored) for name, proxy in proxies.items()}

    def copy(self) -> InputTable:
        """An independent table for the next edit."""
        stored, values = dict(self._stored), dict(self._values)
        made = InputTable(
            self._ledger, self._stage, self._plugin, stored, values, self._others, self.roots, self.notes.copy()
        )
        made._names |= {name: known for name, known in self._names.items() if name not in made._names}
        return made

    @property
    def plugin(self) -> str:
        """The plugin whose turn it is."""
        return self._plugin

    def name_of(self, proxy: TensorProxy) -> str | None:
        """The parameter whose value or stored tensor ``proxy`` is, or is after a cast."""
        return self._names.get(proxy.name)

    def follow(self, bsym: BoundSymbol) -> None:
        """Take what casts a parameter for that parameter: autocast puts a cast before the operator that applies it."""
        source = bsym.args[0] if bsym.sym.id in _CASTS and bsym.args else None
        if isinstance(source, TensorProxy) and (name := self.name_of(source)):
            cast = bsym.output
            if isinstance(cast, TensorProxy) and (cast.shape, cast.device) == (source.shape, source.device):
                self._names[cast.name] = name

    def current(self, name: str) -> TensorProxy:
        """The value that the model's operators read for a parameter of the trace."""
        return self._values[self._ledger.canonical(name)]

    def names_in(self, trace: TraceCtx) -> Iterator[str]:
        """Names of the parameters whose inputs the trace reads, in order of first use."""
        waiting = {proxy.name: name for name, proxy in self._stored.items()}
        for bsym in trace.bound_symbols:
            if bsym.sym.id == _UNPACK:
                continue
            read = (
                tree_flatten(bsym.args[0]["output"])[0] if bsym.sym.id == prims.PrimIDs.RETURN else bsym.flat_proxy_args
            )
            for argument in read:
                name = waiting.pop(getattr(argument, "name", ""), None)
                if name is not None:
                    yield name

    def value(self, name: str, trace: TraceCtx) -> TensorProxy:
        name = self._ledger.canonical(name)
        if name not in self._values:
            self.set_value(name, self.stored(name, trace))
        return self._values[name]

    def set_value(self, name: str, proxy: TensorProxy) -> None:
        name = self._ledger.canonical(name)
        self._values[name] = proxy
        self._names[proxy.name] = name

    def stored(self, name: str, trace: TraceCtx) -> TensorProxy:
        """The input proxy for a parameter as the ledger records it after this plugin; made if it is new or outdated."""
        name = self._ledger.canonical(name)
        version = self.version(name)
        proxy = self._stored.get(name)
        if proxy is None or not matches(proxy, version):
            self._stored[name] = proxy = self._make(version, trace)
            self._names[proxy.name] = name
            # Until a plugin restores something else from it, what is stored is the value.
            self._values.setdefault(name, proxy)
        return proxy

    def version(self, name: str) -> Version:
        """What the ledger says of a parameter as this plugin left it."""
        version = self._ledger.at(name, self._stage)
        if version is None:
            raise PipelineError(
                f"Plugin {self._plugin!r} reads parameter {name!r}, which a later plugin adds.",
                "Read only what exists when your plugin's turn comes, or declare `after` in the manifest.",
                name=name,
            )
        return version

    def _make(self, version: Version, trace: TraceCtx) -> TensorProxy:
        base = "t_" + version.name.replace(".", "_")
        name = base if not trace.has_name(base) else f"{base}_{self._plugin}"
        while trace.has_name(name):
            name += "_"
        with tracectx(trace):
            return TensorProxy(
                name=name,
                shape=version.stored_shape,
                device=to_device(version.device),
                dtype=to_dtype(version.dtype),
                requires_grad=version.requires_grad,
                tags={ProxyTag.STATIC_MEMORY_LOCATION},
            )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the computation: what is no parameter first, then the stored parameters."""
        return (*self._others, *self._stored.values())

    @property
    def inputs(self) -> dict[str, TensorProxy]:
        """Parameter names and their input proxies."""
        return dict(self._stored)

    def versions(self) -> dict[str, Version]:
        """What the ledger says of each input."""
        return {name: self.version(name) for name in self._stored}

    def close(self, trace: TraceCtx, body: Sequence[BoundSymbol], last: BoundSymbol, taken: Sequence[Any]) -> TraceCtx:
        """Write arguments, unpacking and flat_args of ``trace`` around ``body`` and its return ``last``.

        ``last`` comes from a trace with the arguments ``taken``. Where its flat_args name another proxy for one,
        the model updates that argument in place; it is by this reference alone that Thunder keeps the update.
        """
        arguments = self.arguments
        flat_args = last.args[0]["flat_args"]
        updated = {a.name: now for a, now in zip(taken, flat_args, strict=True) if now.name != a.name}
        with tracectx(trace):
            unpack = [prims.unpack_trivial.bind(a, output=a, name=a.name) for a in arguments]
        last = last.from_bsym(args=({**last.args[0], "flat_args": [updated.get(a.name, a) for a in arguments]},))
        trace.bound_symbols = [*unpack, *body, last]
        trace.scopes = [trace.bound_symbols]
        trace.args = arguments
        signature = type(trace._siginfo)(trace._siginfo.name)
        signature.args = [(a.name, None) for a in arguments]
        trace._siginfo = signature
        return trace

    def advance(self, trace: TraceCtx, stage: int, plugin: str) -> tuple[TraceCtx, InputTable]:
        """The table and trace as ``plugin`` finds them: trainability follows the ledger, the rest is unchanged."""
        table = self.copy()
        table._stage, table._plugin = stage, plugin
        table.notes.advance()
        swaps: dict[Any, TensorProxy] = {}
        new = from_trace(trace)
        new.names = set(trace.names)
        with tracectx(new):
            for name, proxy in self._stored.items():
                version = table.version(name)
                if proxy.requires_grad == version.requires_grad:
                    continue
                new.names.discard(proxy.name)
                retagged = proxy.replace(requires_grad=version.requires_grad)
                swaps[variableify(proxy)] = retagged
                table._stored[name] = retagged
                if table._values[name] is proxy:
                    table._values[name] = retagged
        if not swaps:
            return trace, table
        body = [b.from_bsym_swap_proxies(swaps) for b in trace.bound_symbols if b.sym.id != _UNPACK]
        return table.close(new, body[:-1], body[-1], trace.args), table


def matches(proxy: TensorProxy, version: Version) -> bool:
    """Whether an input proxy describes the tensor that the ledger records."""
    return (
        tuple(proxy.shape) == version.stored_shape
        and to_torch_dtype(proxy.dtype) == version.dtype
        and proxy.device == to_device(version.device)
        and proxy.requires_grad == version.requires_grad
    )


def updated_in_place(trace: TraceCtx) -> set[str]:
    """Names of the arguments of a computation that the model updates in place."""
    flat_args = trace.bound_symbols[-1].args[0]["flat_args"]
    updated = {a.name for a, now in zip(trace.args, flat_args, strict=True) if now.name != a.name}
    copied = {b.args[1].name for b in trace.bound_symbols if b.sym.name == "copy_"}
    return updated | (copied & {a.name for a in trace.args})


def live_mismatch(version: Version, tensor: torch.Tensor) -> str | None:
    """How a live tensor differs from what the ledger records, or None."""
    found = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    expected = (version.stored_shape, version.dtype, version.requires_grad)
    return None if found == expected else f"is {found} but was recorded as {expected}"
