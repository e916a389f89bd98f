"""`import thunder` on a torch without named tensors (U22), each case in a process of its own."""

import subprocess
import sys

import pytest
import torch

METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")
needs_help = pytest.mark.skipif(hasattr(torch.Tensor, METHODS[0]), reason="this torch still has named tensors")


def python(code):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)


def test_thunder_can_be_imported_after_and_nothing_is_left_behind():
    result = python(f"""
import sys
import thunder_xform
assert not {{"torch", "thunder"}} & set(sys.modules), "importing the package imported torch"
import torch
before = {{name: getattr(torch.Tensor, name, None) for name in {METHODS}}}
import thunder
assert {{name: getattr(torch.Tensor, name, None) for name in {METHODS}}} == before
assert thunder.__spec__.loader is thunder.__loader__
import importlib.machinery
assert type(thunder.__loader__) is importlib.machinery.SourceFileLoader, thunder.__loader__
x = torch.ones(3)
assert torch.equal(thunder.jit(lambda x: x + x)(x), x + x)
import importlib
importlib.reload(thunder_xform)
assert sum(type(f).__name__ == "_ThunderFinder" for f in sys.meta_path) <= 1
print("fine")
""")
    assert result.stdout == "fine\n", result.stderr


@needs_help
def test_importing_thunder_first_fails_with_its_own_error():
    result = python("import thunder")
    assert result.returncode != 0
    assert "AttributeError" in result.stderr.splitlines()[-1]
    assert "align_as" in result.stderr.splitlines()[-1]


@needs_help
def test_a_failed_import_leaves_no_stand_ins():
    result = python(f"""
import sys, thunder_xform, torch
sys.modules["thunder.core"] = None
try:
    import thunder
except ImportError as error:
    print(type(error).__name__)
assert not any(hasattr(torch.Tensor, name) for name in {METHODS})
del sys.modules["thunder.core"]
import thunder
print(thunder.__name__)
""")
    assert result.stdout == "ModuleNotFoundError\nthunder\n", result.stderr


def test_without_thunder_the_import_fails_as_ever():
    result = python("""
import sys, importlib.machinery, thunder_xform
class Hide(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "thunder" else super().find_spec(name, path, target)
sys.meta_path[:] = [f for f in sys.meta_path if f is not importlib.machinery.PathFinder] + [Hide]
try:
    import thunder
except ModuleNotFoundError as error:
    print(error.name)
""")
    assert result.stdout == "thunder\n", result.stderr
