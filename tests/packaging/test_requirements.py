"""No distribution needs more than it says: an integration does not pull in, or import, the library of another.

What uses more than it declares shows in full in `make isolated`, which installs each distribution alone.
"""

import json
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: What a distribution brings besides the core and what the core brings. Extras count apart.
DECLARED = {
    "thunder-xform": set(),
    "thunder-xform-accelerate": {"accelerate"},
    "thunder-xform-aten": set(),
    "thunder-xform-ddp": set(),
    "thunder-xform-fabric": {"lightning"},
    "thunder-xform-fsdp": set(),
    "thunder-xform-lora": set(),
    "thunder-xform-qlora": {"bitsandbytes", "thunder-xform-lora", "thunder-xform-quant"},
    "thunder-xform-quant": set(),
}
#: Libraries that some distribution or its tests use, by the module that is imported.
LIBRARIES = {
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "lightning": "lightning",
    "lightning_fabric": "lightning-fabric",
    "litgpt": "litgpt",
    "peft": "peft",
    "pytorch_lightning": "pytorch-lightning",
    "transformers": "transformers",
}
#: Of these, what torchmetrics, hence Lightning, imports wherever it is installed.
SOFT = {"transformers"}

#: Imports every module of some packages where nobody finds the hidden ones; prints which packages were loaded.
IMPORT_ALL = """
import importlib, importlib.machinery, json, pkgutil, sys
hidden, packages = map(json.loads, sys.argv[1:])
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)
for name in packages:
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        importlib.import_module(module.name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def closure(name, extras=()):
    """Canonical names of a distribution and of all that installing it installs."""
    found, todo = set(), [(name, frozenset(extras))]
    seen = set()
    while todo:
        if (item := todo.pop()) in seen:
            continue
        seen.add(item)
        name, extras = item
        found.add(canonicalize_name(name))
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
                todo.append((requirement.name, frozenset(requirement.extras)))
    return found


def test_a_wheel_asks_for_what_its_package_needs_and_no_more(project):
    core, own = closure("thunder-xform"), closure(project.name)
    assert core <= own
    assert DECLARED[project.name] <= own
    assert own & {name for name in own if name.startswith("thunder-xform")} == {
        "thunder-xform",
        project.name,
        *(name for name in DECLARED[project.name] if name.startswith("thunder-xform")),
    }
    foreign = set(LIBRARIES.values()) - DECLARED[project.name]
    if "lightning" in DECLARED[project.name]:
        foreign -= {"pytorch-lightning"}  # A part of `lightning` under its old name.
    assert not own & foreign


@pytest.mark.parametrize("library", [None, "accelerate", "lightning"])
def test_a_package_imports_no_library_of_another(projects, library):
    """An integration runs without the libraries of the others, everything else without any of them."""
    chosen = [p for p in projects if library in (DECLARED[p.name] & {"accelerate", "lightning"} or {None})]
    if not chosen:
        pytest.skip(f"none that is installed uses {library}")
    packages = {project.package for project in chosen}
    # bitsandbytes is an extra of quant, which qlora asks for.
    allowed = set().union(*(closure(project.name) for project in chosen)) - {"bitsandbytes"}
    hidden = {module for module, distribution in LIBRARIES.items() if distribution not in allowed}
    hidden -= SOFT if library == "lightning" else set()
    hidden |= {name.replace("-", "_") for name in DECLARED} - packages - {"thunder_xform"}
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, json.dumps([*hidden]), json.dumps([*packages])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert packages <= loaded
    assert loaded.isdisjoint(hidden)
