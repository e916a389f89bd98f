"""Importing this package, Thunder through it, and its plugins warns of nothing, under ``-W error`` either."""

import subprocess
import sys

IMPORTS = """
import importlib
import thunder_xform as tx
import thunder
for name in tx.__all__:
    getattr(tx, name)
for name in ("ddp", "fsdp", "lora", "quant", "aten"):
    importlib.import_module(f"thunder_xform_{name}.plugin")
import warnings
assert not any("transformer_engine" in str(entry) for entry in warnings.filters), "filters are as they were"
"""


def test_imports_are_quiet():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
