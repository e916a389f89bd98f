"""The only code that touches Thunder's internals.

Traces, parameter overrides, guards and verification live here. Everything above (``pipeline``, ``parallel``,
``checkpoint`` and every plugin) works through the classes of this package, so a new Thunder release is absorbed here
and in ``tests/host/test_thunder_contract.py``, which pins the private behaviour relied upon.

Import the modules by name: this file imports nothing, because :mod:`thunder_xform.host.compat` must be importable
before Thunder (and without torch).
"""
