"""What a plan costs per plugin, for 100 to 800 plugins: microseconds of CPU time, the best of five.

python benchmarks/plan.py
"""

from __future__ import annotations

import time
from typing import Any

from thunder_xform.manifest import STAGES, Effects, Manifest
from thunder_xform.registry import Record, Registry

SIZES = (100, 200, 400, 800)


def wide(i: int, n: int) -> dict[str, Any]:
    return {"stage": STAGES[i * len(STAGES) // n]}


def chain(i: int, n: int) -> dict[str, Any]:
    after = {"after": (f"p{i - 1:04}",)} if i else {}
    return {"effects": Effects(reads=("params",), writes=("trace.compute",)), **after}


def required(i: int, n: int) -> dict[str, Any]:
    return {"requires": (f"p{i + 1:04}",) if i + 1 < n else ()}


def provided(i: int, n: int) -> dict[str, Any]:
    return {"provides": (f"cap.x{i:04}",), "requires": (f"cap.x{i + 1:04}",) if i + 1 < n else ()}


def wanted(i: int, n: int) -> dict[str, Any]:
    return {"wants": (f"p{i + 1:04}",) if i + 1 < n else ()}


def commuting(i: int, n: int) -> dict[str, Any]:
    return {"provides": ("cap.x",), "commutes": ("cap.x",), "effects": Effects(writes=("trace.compute",))}


KINDS = {kind.__name__: kind for kind in (wide, chain, required, provided, wanted, commuting)}
#: What a request names; the rest is pulled in.
FIRST_ONLY = ("required", "provided", "wanted")


def prepared(kind: str, n: int) -> tuple[Registry, str]:
    """A registry of `n` plugins, and the text of a request that brings in all of them."""
    manifests = [
        Manifest(**{"name": f"p{i:04}", "plugin": "no_such:P", "stage": "adapters", **KINDS[kind](i, n)})
        for i in range(n)
    ]
    records = (Record(name=m.name, distribution=f"dist-{m.name}", version="1", manifest=m) for m in manifests)
    return Registry(records), "p0000" if kind in FIRST_ONLY else " + ".join(m.name for m in manifests)


def main() -> None:
    print("kind       " + "".join(f"{n:>8}" for n in SIZES))
    for kind in KINDS:
        costs = []
        for n in SIZES:
            registry, text = prepared(kind, n)
            spent = []
            for _ in range(5):
                start = time.process_time()
                resolution = registry.plan(text)
                resolution.why(*resolution.order[:2])
                spent.append(time.process_time() - start)
            assert len(resolution) == n
            costs.append(min(spent) / n)
        print(f"{kind:<11}" + "".join(f"{cost * 1e6:>8.1f}" for cost in costs))


if __name__ == "__main__":
    main()
