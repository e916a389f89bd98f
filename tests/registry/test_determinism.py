"""A set of plugins has one order: that of request, installation, sys.path and hashes is no matter."""

import json
import random

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

NAMES = ("lora", "fsdp", "ddp", "quant", "remat", "timing")
STAGES = ("weights", "adapters", "distribute", "schedule")
CAPABILITIES = ("cap.x", "cap.y", "other.z")

# Edges go from a smaller to a greater index, so that no scenario is cyclic.
plugin = st.fixed_dictionaries(
    {
        "provides": st.sets(st.sampled_from(CAPABILITIES), max_size=2),
        "before": st.sets(st.integers(1, len(NAMES) - 1), max_size=3),
        "requires": st.sets(st.sampled_from(NAMES), max_size=1),
        "wants": st.sets(st.sampled_from((*NAMES, *CAPABILITIES)), max_size=2),
    }
)
scenario = st.tuples(
    st.permutations(NAMES),
    st.lists(st.sampled_from(range(4)), min_size=len(NAMES), max_size=len(NAMES)),
    st.lists(plugin, min_size=len(NAMES), max_size=len(NAMES)),
    st.sets(st.sampled_from(NAMES), min_size=2),
)

SCRIPT = """
from thunder_xform.errors import ResolutionError
from thunder_xform.manifest import Manifest

def manifest(fields):
    return Manifest(**{{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}})

result = []
for scenario, orders in json.load(open({path!r})):
    outcomes = []
    for install, request in orders:
        records = [
            registry.Record(name=n, distribution="d-" + n, version="1", manifest=manifest(scenario[n]))
            for n in install
        ]
        try:
            r = registry.Registry(records).plan(request)
        except ResolutionError as error:
            outcomes.append(["error", str(error)])
        else:
            outcomes.append(["order", r.order, r.lock.digest, [step.reason for step in r.steps]])
    result.append(outcomes)
"""


def build(drawn, shuffle):
    """The manifests of a scenario, and pairs of an install order and a request order."""
    ranked, stages, plugins, requested = drawn
    manifests = {}
    for index, (name, stage, fields) in enumerate(zip(ranked, sorted(stages), plugins, strict=True)):
        manifests[name] = {
            "name": name,
            "plugin": f"m_{name}:P",
            "stage": STAGES[stage],
            "provides": sorted(fields["provides"]),
            "before": sorted(ranked[other] for other in fields["before"] if other > index),
            "requires": sorted(fields["requires"] - {name}),
            "wants": sorted(fields["wants"] - {name}),
        }
    orders = []
    for _ in range(6):
        install, request = list(NAMES), sorted(requested)
        shuffle(install)
        shuffle(request)
        orders.append((install, request))
    return manifests, orders


# Shrinking would start ten processes for every attempt.
@settings(max_examples=1, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(scenario, min_size=30, max_size=40), st.randoms(use_true_random=False))
def test_same_set_same_order(evaluate, tmp_path_factory, drawn, randomness: random.Random):
    path = tmp_path_factory.mktemp("scenarios") / "scenarios.json"
    path.write_text(json.dumps([build(one, randomness.shuffle) for one in drawn]))
    runs = [evaluate(SCRIPT.format(path=str(path)), PYTHONHASHSEED=str(seed)) for seed in range(10)]
    for outcomes in zip(*runs, strict=True):
        assert len({json.dumps(outcome) for run in outcomes for outcome in run}) == 1
    kinds = [run[0][0] for run in runs[0]]
    assert kinds.count("order") > len(kinds) / 2, "too few scenarios resolve for this test to mean anything"


def test_sys_path_order_and_install_order_do_not_matter(make_site, manifest_text, evaluate):
    first, second = make_site("first"), make_site("second")
    first.install("zz", manifest_text("zz"))
    second.install("aa", manifest_text("aa"))
    first.install("mm", manifest_text("mm", more='after = ["zz"]\n'))
    code = """
r = registry.plan(["mm", "aa", "zz"])
result = [r.order, r.lock.digest, [x.name for x in registry.list()]]
"""
    there, back = evaluate(code, first, second), evaluate(code, second, first)
    assert there == back
    assert there[0] == ["aa", "zz", "mm"]
    assert there[2] == ["aa", "mm", "zz"]
