"""Names to pipelines: discovery, ordering, explanation and locking of plugins.

Nothing here imports torch, Thunder or a plugin's code, except `resolve`, for the plugins it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from thunder_xform.registry._order import Edge
from thunder_xform.registry._record import Record
from thunder_xform.registry._registry import Edges, Options, Registry, installed
from thunder_xform.registry.lock import Lock
from thunder_xform.registry.resolution import Explanation, Resolution
from thunder_xform.registry.step import Step

if TYPE_CHECKING:
    from thunder_xform.pipeline import Pipeline

__all__ = [
    "Edge",
    "Explanation",
    "Lock",
    "Record",
    "Registry",
    "Resolution",
    "Step",
    "clear_cache",
    "list",
    "plan",
    "resolve",
    "why",
]


def list(*, allow: Iterable[str] | None = None, deny: Iterable[str] | None = None) -> tuple[Record, ...]:
    """`Registry.list` of the installed plugins."""
    return installed().list(allow=allow, deny=deny)


def plan(
    request: object,
    *,
    options: Options | None = None,
    allow: Iterable[str] | None = None,
    deny: Iterable[str] | None = None,
    edges: Edges = (),
) -> Resolution:
    """`Registry.plan` of the installed plugins."""
    return installed().plan(request, options=options, allow=allow, deny=deny, edges=edges)


def resolve(
    request: object,
    *,
    options: Options | None = None,
    allow: Iterable[str] | None = None,
    deny: Iterable[str] | None = None,
    edges: Edges = (),
    check: Literal["eager"] | None = None,
) -> Pipeline:
    """`Registry.resolve` of the installed plugins."""
    return installed().resolve(request, options=options, allow=allow, deny=deny, edges=edges, check=check)


def why(a: str, b: str, **selection: Any) -> Explanation:
    """`Registry.why` of the installed plugins."""
    return installed().why(a, b, **selection)


def clear_cache() -> None:
    """Forget what was found installed, for programs that install or remove plugins while they run."""
    from thunder_xform.registry import _host, _options

    for cached in (installed, _host.installed_version, _options.read_options):
        cached.cache_clear()
