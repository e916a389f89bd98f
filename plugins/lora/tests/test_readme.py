"""The README's programs run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = (Path(__file__).resolve().parents[1] / "README.md").read_text("utf-8")


def test_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, load, *others = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(train, names)
    trained = names["model"].eval()
    exec(load, names)
    x = torch.randn(3, 16)
    expected = trained(x)
    torch.testing.assert_close(names["model"].eval()(x), expected, atol=0, rtol=0)
    names["net"].load_state_dict(torch.load("merged.pt", weights_only=True))
    torch.testing.assert_close(names["net"](x), expected, atol=1e-6, rtol=1e-5)
    for program in others:
        exec(program, names)
