"""``thunder-xform doctor MODULE:FACTORY``: a model against eager PyTorch from the command line."""

import json
import subprocess
import sys

import pytest
import torch

from thunder_xform.cli import main

MODELS = """
import torch


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return self.linear(x) * scale


class Different(Scaled):
    def forward(self, x):
        return self.linear(x) * (2 if torch.compiler.is_compiling() else 1)


def small():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
    return torch.nn.Sequential(*layers), torch.randn(3, 4)


def keywords():
    return Scaled(), {"x": torch.randn(3, 4), "scale": 2.0}


def positional():
    return Scaled(), (torch.randn(3, 4), 3.0)


def different():
    return Different(), torch.randn(3, 4)


def nothing():
    return 3


def alone():
    return Scaled(), 1, 2
"""
EQUAL = "equals eager PyTorch within 0.0001 (outputs: 1, buffers: 0, gradients of inputs: 0, of parameters: {})"
FACTORY = " Name it as MODULE:FUNCTION, from a folder where `python -c 'import MODULE'` works."
RETURN = " Return the model and its arguments: `return model, (input,)`, or a dictionary of keyword arguments."


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models_of_mine.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("models_of_mine", None)


@pytest.fixture
def doctor(folder, capsys):
    """Runs the command; gives its status and what it says of the model, by topic."""

    def run(*arguments):
        path = list(sys.path)
        status = main(["doctor", *arguments, "--json"])
        assert sys.path == path
        found = {f["topic"]: (f["level"], f["text"]) for f in json.loads(capsys.readouterr().out)}
        return status, {topic: each for topic, each in found.items() if topic.startswith("model")}

    return run


@pytest.mark.parametrize(("factory", "trained"), [("small", 4), ("keywords", 2), ("positional", 2)])
def test_a_model_that_equals_eager(doctor, factory, trained):
    _, findings = doctor(f"models_of_mine:{factory}")
    report = "ok", EQUAL.format(trained)
    assert findings == {"model: train": report, "model: eval": report}


def test_a_model_with_plugins(doctor):
    pytest.importorskip("thunder_xform_lora")
    _, findings = doctor("models_of_mine:small", "--with", "lora(r=2)")
    assert findings["model: train"] == ("ok", EQUAL.format(4))
    _, findings = doctor("models_of_mine:small", "--with", "lorra")
    assert findings["model"][0] == "problem"
    assert "lorra" in findings["model"][1]


def test_a_model_that_departs(doctor):
    status, findings = doctor("models_of_mine:different")
    assert status == 1
    level, text = findings["model"]
    assert level == "problem"
    assert text.startswith("The compiled model departs from eager PyTorch: output 0 differs by up to ")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            "models_of_mine:absent",
            "'models_of_mine:absent' leads to no factory (AttributeError: module 'models_of_mine' has no attribute "
            "'absent')." + FACTORY,
        ),
        (
            "no_such_module:small",
            "'no_such_module:small' leads to no factory (ModuleNotFoundError: No module named 'no_such_module')."
            + FACTORY,
        ),
        ("models_of_mine", "'models_of_mine' names no function of a module." + FACTORY),
        ("models_of_mine:nothing", "'models_of_mine:nothing' returned an object of type int." + RETURN),
        ("models_of_mine:alone", "'models_of_mine:alone' returned a tuple of Scaled, int, int." + RETURN),
    ],
)
def test_no_factory(doctor, target, text):
    assert doctor(target) == (1, {"model": ("problem", text)})


@pytest.mark.timeout(200)
def test_ranks_check_together(folder):
    pytest.importorskip("thunder_xform_fsdp")
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "thunder_xform.cli", "doctor", "models_of_mine:small", "--with", "fsdp(zero=3)", "--json"]
    done = subprocess.run([*torchrun, *command], capture_output=True, text=True, timeout=180, check=False)
    findings = {f["topic"]: f["text"] for f in json.loads(done.stdout)}
    assert findings["model: train"] == EQUAL.format(4), done.stderr


def test_nothing_stays_switched(doctor):
    _, _ = doctor("models_of_mine:small")
    assert torch.is_grad_enabled()
    assert not torch.distributed.is_initialized()
