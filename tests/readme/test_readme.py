"""The README's programs run as they are printed."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def _run(*arguments, cwd, path=""):
    environment = os.environ | {"PYTHONPATH": str(path)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.timeout(300)
def test_example_runs_as_shown(tmp_path):
    import torch

    for plugin in "fsdp", "lora":
        pytest.importorskip(f"thunder_xform_{plugin}", reason=f"needs the plugin {plugin}")
    program, printed = _blocks("python")[0], _blocks("text")[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    (tmp_path / "example.py").write_text(program)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = _run(*launcher, "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(printed) == 2
    states = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    assert plain.load_state_dict(states[0]).missing_keys == []
    torch.testing.assert_close(*states, rtol=0, atol=0)


USE_OF_PLUGIN = """
import thunder_xform as tx
import thunder
import torch

net = torch.nn.Linear(3, 2)
model = thunder.jit(net, transforms=tx.registry.resolve(["only"], options={"only": {"names": "bias"}}))
model(torch.ones(1, 3)).sum().backward()
print({name: parameter.grad is not None for name, parameter in model.named_parameters()})
print(all(parameter.requires_grad for parameter in net.parameters()))
"""


def test_plugin_builds_validates_and_runs_as_shown(tmp_path):
    project, site = tmp_path / "project", tmp_path / "site"
    blocks = [block for block in _blocks("toml") + _blocks("python") if block.startswith("# ")]
    files = {block.splitlines()[0].removeprefix("# "): block for block in blocks}
    assert len(files) == 4
    for name, content in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(content)
    (project / "thunder_xform_only" / "__init__.py").touch()
    install = ("-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--target", site, project)
    done = _run(*install, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    validate = ("-m", "thunder_xform.cli", "validate", "--imports", project)
    done = _run(*validate, cwd=tmp_path, path=site)
    first, *warnings = done.stdout.splitlines()
    assert (done.returncode, first.split()[-1]) == (0, "valid"), done.stderr
    # It goes after adapters, and is warned where nothing provides any.
    assert not warnings or find_spec("thunder_xform_lora") is None, warnings
    done = _run("-c", USE_OF_PLUGIN, cwd=tmp_path, path=site)
    assert done.stdout == "{'weight': False, 'bias': True}\nTrue\n", done.stderr


def test_every_plugin_is_in_the_table():
    announced = set()
    for file in ROOT.glob("plugins/*/pyproject.toml"):
        entry_points = tomllib.loads(file.read_text("utf-8"))["project"].get("entry-points", {})
        announced |= set(entry_points.get("thunder_xform.plugins", {}))
    table = set(re.findall(r"^\| \[`(\w+)`\]\(plugins/\w+\)", README, re.MULTILINE))
    assert table == announced


def test_links_to_files_exist():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_commands_exist():
    """Every `thunder-xform WORD` that the README names is a command."""
    from thunder_xform.cli import main

    listed = re.findall(r"^thunder-xform (\w+)", "".join(_blocks("text")), re.MULTILINE)
    for command in {*listed, *re.findall(r"`thunder-xform (\w+)", README)}:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
