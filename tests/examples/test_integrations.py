"""The examples of the integrations run at a small size, and their losses fall."""

import re

import pytest

for _module in ("thunder_xform_accelerate", "thunder_xform_fabric", "thunder_xform_lora"):
    pytest.importorskip(_module, reason="an integration is not installed")

SMALL = ("--steps", "3", "--layers", "1", "--width", "32")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = {
    "fabric_finetune.py": ((), ("--devices", "2", "--accumulate", "2")),  # Fabric launches the second process.
    "accelerate_finetune.py": (TORCHRUN, ("--accumulate", "2")),
    "jitted_step.py": (TORCHRUN, ()),
}


@pytest.mark.parametrize("script", LAUNCH)
def test_example(examples, run_python, script, tmp_path):
    launcher, options = LAUNCH[script]
    out = () if script == "jitted_step.py" else ("--out", tmp_path)
    done = run_python(*launcher, examples / script, *SMALL, *options, *out)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    if out:
        assert list(tmp_path.iterdir())
