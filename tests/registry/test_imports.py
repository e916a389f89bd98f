"""What may be imported when, and the time budgets that follow from it."""

import pytest

FORBIDDEN = "[n for n in sys.modules if n.partition('.')[0] in ('torch', 'thunder', 'numpy') or 'imported_' in n]"
HEAVY = "('importlib_metadata', 'packaging', 'tomllib', 'difflib', 'pluggy', 'argparse', 'email')"


@pytest.fixture
def five(site, manifest_text):
    """Five plugins with options, so that planning has all its work to do."""
    options = "from dataclasses import dataclass\n@dataclass\nclass Options:\n    rank: int = 8\n"
    for name in ("aa", "bb", "cc", "dd", "ee"):
        more = f'options = "thunder_xform_{name}.options:Options"\n[host]\ntorch = ">=2.7.1"\n'
        site.install(name, manifest_text(name, more=more), files={"options.py": options})
    return site


def test_importing_the_registry_is_light(evaluate, site):
    heavy = evaluate(f"result = [n for n in {HEAVY} if n in sys.modules]", site)
    assert heavy == []


def test_planning_imports_neither_torch_nor_plugins(five, evaluate):
    code = f"""
sys.path += {[p for p in __import__("sys").path if p.endswith("-packages")]!r}
r = registry.plan("aa(rank=2) + bb + cc + dd + ee")
assert r.order == ("aa", "bb", "cc", "dd", "ee")
registry.list(), r.lock.digest, r.text, r.why("aa", "ee"), registry.why("aa", "bb")
assert __import__("importlib").util.find_spec("torch"), "torch must be there to be left alone"
result = {FORBIDDEN}
"""
    assert evaluate(code, five) == []


TIMED = """
import time
start = time.process_time()
{code}
result = time.process_time() - start
"""


def test_plan_of_five_names_takes_less_than_50_ms(five, evaluate):
    """Cold: discovery and all imports included. A busy machine slows down the yardstick as well."""

    def seconds(code):
        return min(evaluate(TIMED.format(code=code), five) for _ in range(3))

    yardstick = seconds("import importlib_metadata; importlib_metadata.entry_points(group='thunder_xform.plugins')")
    assert seconds("registry.plan('aa(rank=2) + bb + cc + dd + ee')") < max(0.05, 4 * yardstick)
