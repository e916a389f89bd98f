"""A plan of 800 plugins costs at most twice per plugin what one of 100 does: counted in lines that run, not timed."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the benchmarks are not beside the tests")


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_plan", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(call):
    """How many lines of this package run in `call`; those of comprehensions once an item."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if "thunder_xform" not in frame.f_code.co_filename:
            return None
        count += event in ("line", "call")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["wide", "chain", "required", "provided", "wanted", "commuting"])
def test_cost_per_plugin_does_not_grow(benchmark, kind):
    costs = {}
    for n in (100, 800):
        registry, text = benchmark.prepared(kind, n)
        resolutions = []
        costs[n] = lines(lambda: resolutions.append(registry.plan(text))) / n  # noqa: B023
        (resolution,) = resolutions
        assert len(resolution) == n
        costs[n] += lines(lambda: [resolution.why(a, b) for a, b in zip(resolution.order, resolution.order[1:])]) / n  # noqa: B023, B905
    assert costs[800] < 1.3 * costs[100], costs
