"""train.py and generate.py against plain PyTorch: same losses, same weights, same sample."""

import argparse
import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch.nn import functional as F

for _module in ("matplotlib", "rich", "thunder_xform_ddp", "thunder_xform_fsdp", "thunder_xform_lora"):
    pytest.importorskip(_module, reason="the demo's needs are not installed")

SIZES = {"layers": 1, "heads": 2, "width": 32, "window": 32, "batch": 4, "accumulate": 2, "seed": 3}
STEPS, FINETUNE_STEPS, PEAK_LR = 5, 4, 5e-3


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two small texts, unlike each other."""
    folder = tmp_path_factory.mktemp("texts")
    code, prose = folder / "code.txt", folder / "prose.txt"
    code.write_text("".join(f"def f{i}(x):\n    return x * {i} + {i * i % 97}\n\n" for i in range(300)))
    prose.write_text("".join(f"The {i}th sheep is {i % 7} years old and {i % 5} feet high. " for i in range(200)))
    return code, prose


@pytest.fixture(scope="module")
def run(torchrun, texts, tmp_path_factory):
    """A finished run: its folder and what it printed."""
    out = tmp_path_factory.mktemp("run")
    options = [f"--{name}={value}" for name, value in SIZES.items()]
    done = torchrun(
        *options, f"--steps={STEPS}", f"--finetune-steps={FINETUNE_STEPS}", f"--lr={PEAK_LR}", "--out", out,
        "--text", texts[0], "--finetune-text", texts[1], "--quant=none", "--check",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for stage in ("pretraining", "fine-tuning"):
        assert f"{stage}: equals eager PyTorch within 0.0001" in done.stdout
    return out, done.stdout


@pytest.fixture
def curves(run):
    return json.loads((run[0] / "metrics.json").read_text())


@pytest.mark.timeout(400)
def test_pretraining_equals_plain_pytorch(examples, run, curves, texts):
    import gpt
    import train
    from windows import Windows

    torch.manual_seed(SIZES["seed"])
    model = gpt.GPT(gpt.Config(window=32, layers=1, heads=2, width=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    windows = Windows(texts[0].read_text(), 32)
    ranks = [windows.random(SIZES["batch"], seed=1000 * SIZES["seed"] + rank) for rank in (0, 1)]
    before = _validation(model, windows)
    losses = []
    for step in range(STEPS):
        batches = [next(ranks[rank]) for rank in (0, 1) for _ in range(SIZES["accumulate"])]
        loss = torch.stack([_loss(model, batch) for batch in batches]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = PEAK_LR * train.warmup_and_cosine(step, STEPS)
        optimizer.step()
        losses.append(loss.item())

    curve = curves[0]
    assert curve["pipeline"] == ["ddp"]
    assert curve["losses"] == pytest.approx(losses, abs=1e-5)
    assert curve["before"] == pytest.approx(before, abs=1e-5)
    assert curve["after"] == pytest.approx(_validation(model, windows), abs=1e-5)
    assert curve["trained"] == sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(_plain(run[0], merge=False).state_dict(), model.state_dict(), rtol=0, atol=1e-5)


def test_finetuning_improves_on_the_new_text(curves):
    curve = curves[1]
    assert curve["pipeline"] == ["lora", "fsdp"]
    assert len(curve["losses"]) == FINETUNE_STEPS
    assert curve["after"] < curve["before"]
    assert curve["trained"] < curves[0]["trained"]
    assert curve["tokens_per_second"] > 0


def test_saved_files_hold_the_finetuned_model(examples, run, curves, texts):
    """Base and adapter, merged by hand into the plain model, give the loss that training reported."""
    from windows import Windows

    windows = Windows(texts[1].read_text(), 32)
    assert curves[1]["before"] == pytest.approx(_validation(_plain(run[0], merge=False), windows), abs=1e-5)
    assert curves[1]["after"] == pytest.approx(_validation(_plain(run[0], merge=True), windows), abs=1e-5)


def test_generating_samples_from_both_models(examples, run, run_python):
    import generate

    prompt, length = "The 7th", 12
    done = run_python(examples / "generate.py", run[0], "--prompt", prompt, "--length", length)
    assert done.returncode == 0, done.stderr
    args = argparse.Namespace(prompt=prompt, length=length, temperature=0.7, seed=0)
    samples = [generate.generate(_plain(run[0], merge), args, SIZES["window"]) for merge in (False, True)]
    assert done.stdout == f"--- Base model\n{samples[0]}\n\n--- With the adapter\n{samples[1]}\n\n"


def test_picture_and_table(run):
    out, printed = run
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert printed.count("pretraining") >= 2  # the bar and the table, from one rank only
    assert printed.count("Validation loss") == 1
    assert "lora -> fsdp" in printed


@pytest.mark.timeout(400)
def test_finetuning_on_a_quantized_base_holds_it_in_few_bits(torchrun, texts, tmp_path):
    sizes = SIZES | {"width": 64}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    done = torchrun(
        *options, "--steps=1", "--finetune-steps=3", "--quant=int8", "--out", tmp_path,
        "--text", texts[0], "--finetune-text", texts[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "quant -> lora -> fsdp" in done.stdout
    plain, held = map(float, re.search(r"Base weights: (\S+) MiB .*, (\S+) MiB", done.stdout).groups())
    assert held < plain / 2  # half of it is on the other rank, and the linear layers take a quarter
    losses = json.loads((tmp_path / "metrics.json").read_text())[1]["losses"]
    assert len(losses) == 3
    assert all(loss < 6 for loss in losses)


@pytest.mark.timeout(400)
def test_crash_on_one_rank_ends_the_run_with_its_error(torchrun, texts, tmp_path):
    options = [f"--{name}={value}" for name, value in SIZES.items()]
    done = torchrun(*options, "--text", texts[0], "--finetune-text", texts[1], "--out", tmp_path, "--fail-at=1:1")
    assert done.returncode != 0
    root_cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank\s*:\s*1\b", root_cause), done.stderr
    assert "RuntimeError: Rank 1 fails at step 1 of pretraining" in root_cause
    assert not (tmp_path / "base.safetensors").exists()


def _loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def _validation(model, windows):
    batches = [batch for rank in (0, 1) for batch in windows.spread(SIZES["batch"], 8, rank, 2)]
    return torch.stack([_loss(model, batch) for batch in batches]).mean().item()


def _plain(folder, merge):
    """The model of a run in plain PyTorch, the adapter added to its weights or not."""
    import gpt

    with safe_open(folder / "base.safetensors", framework="pt") as file:
        model = gpt.GPT(gpt.Config(**json.loads(file.metadata()["config"])))
    load_model(model, folder / "base.safetensors")
    adapter = load_file(folder / "adapter.safetensors")
    for name in [name for name in adapter if ".lora_A." in name] if merge else []:
        layer = model.get_submodule(name.partition(".lora_A.")[0])
        with torch.no_grad():
            layer.weight += 2 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]  # alpha / r = 32 / 16
    return model
