"""The registry: names in, explained pipelines out."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from thunder_xform.manifest import STAGES, Manifest
from thunder_xform.registry._catalog import Catalog
from thunder_xform.registry._policy import Policy
from thunder_xform.registry._record import Record
from thunder_xform.registry.resolution import Explanation, Resolution, refuse_twice
from thunder_xform.registry.step import Step

if TYPE_CHECKING:
    from thunder_xform.pipeline import Pipeline

__all__ = ["Registry", "installed"]

Options = Mapping[str, Mapping[str, Any]]
Edges = Iterable[tuple[str, str]]


class Registry:
    """A fixed set of announced plugins.

    The module's functions work on the plugins that are installed; a registry of one's own is sealed from
    those and serves tests and programs that bring their plugins along.

    Args:
        records: what is announced.
        environ: where ``THUNDER_XFORM_ALLOW`` and ``THUNDER_XFORM_DENY`` are looked up.
    """

    def __init__(self, records: Iterable[Record], *, environ: Mapping[str, str] | None = None) -> None:
        self._records = tuple(records)
        self._environ = {} if environ is None else environ

    def catalog(self, allow: Iterable[str] | None = None, deny: Iterable[str] | None = None) -> Catalog:
        """The plugins as judged by the allow and deny lists, the host's versions, and rival claims."""
        return Catalog(self._records, Policy.gather(allow, deny, self._environ))

    def list(self, *, allow: Iterable[str] | None = None, deny: Iterable[str] | None = None) -> tuple[Record, ...]:
        """All announced plugins, sorted by name, with status and error; broken ones included."""
        return self.catalog(allow, deny).records

    def plan(
        self,
        request: object,
        *,
        options: Options | None = None,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] | None = None,
        edges: Edges = (),
    ) -> Resolution:
        """Order the requested plugins and all they require, without importing any of them.

        Args:
            request: a name, a pair ``(name, options)``, an options or plugin instance, a text such as
                ``"lora(r=8) + fsdp(zero=3)"``, or a list of these.
            options: further options by plugin name, also for plugins that were pulled in.
            allow, deny: names or distributions, besides ``THUNDER_XFORM_ALLOW`` and ``THUNDER_XFORM_DENY``.
            edges: additional order, as pairs ``(first, then)`` of names or capabilities.

        Raises:
            ResolutionError: one of its subclasses, saying what to change.
            ManifestError, DiscoveryError: a requested plugin is installed but broken.
        """
        from thunder_xform.registry._plan import make_plan

        return make_plan(request, self.catalog(allow, deny), options, edges)

    def resolve(
        self,
        request: object,
        *,
        options: Options | None = None,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] | None = None,
        edges: Edges = (),
        check: Literal["eager"] | None = None,
    ) -> Pipeline:
        """`plan`, then load the planned plugins and no others; each call makes new plugin objects.

        Args:
            request, options, allow, deny, edges: as for `plan`.
            check: "eager" to compare each newly compiled entry, once, with the plain model in eager PyTorch.

        Returns:
            A list of Thunder transforms, for ``thunder.jit(model, transforms=...)``. An empty request gives one that
            does nothing but what every pipeline does: guards, checks, a handle.

        Raises:
            LoadError: a planned plugin cannot be imported or instantiated.
            OptionError: an option's value is not accepted.
            HostVersionError: what a planned plugin runs on is not installed.
        """
        from thunder_xform.registry._host import require_host
        from thunder_xform.registry._load import load

        resolution = self.plan(request, options=options, allow=allow, deny=deny, edges=edges)
        require_host(resolution.steps)
        # The one import that goes up a floor: `resolve` is where the registry hands over.
        from thunder_xform.pipeline import Plugin, build

        return build(resolution, load(resolution) or [(_BARE, Plugin(None))], check=check)

    def why(self, a: str, b: str, **selection: Any) -> Explanation:
        """Why `a` and `b` run in their order when both are requested; keywords as for `plan`.

        Raises:
            DuplicateRequestError: they are one.
        """
        refuse_twice(a, b)
        return self.plan([a, b], **selection).why(a, b)


#: Stands for the plugins of an empty request.
_BARE = Step(name="bare", distribution="thunder-xform", version="", manifest=Manifest(name="bare", stage=STAGES[0]))


@functools.cache
def installed() -> Registry:
    """The registry of the installed plugins; they are looked for once per process."""
    from thunder_xform.registry._discovery import scan

    return Registry(scan(), environ=os.environ)
