"""A file that one rank cannot read stops all ranks, and changes nothing."""

import pytest
import torch

pytest.importorskip("thunder_xform_ddp", reason="needs the plugin ddp")


def load(folder):
    import thunder
    import torch.distributed as dist

    import thunder_xform as tx

    torch.manual_seed(0)
    pipeline = tx.registry.resolve(["lora", "ddp"], options={"lora": {"r": 2}})
    model = thunder.jit(torch.nn.Linear(4, 3), transforms=pipeline)
    handle = tx.handle(model)
    tx.checkpoint.save_adapter(handle, f"{folder}/good.safetensors")
    dist.barrier()
    before = {name: tensor.clone() for name, tensor in handle.state_dict("adapter").items()}
    name = "good" if dist.get_rank() == 0 else "missing"
    try:
        tx.checkpoint.load_adapter(handle, f"{folder}/{name}.safetensors")
        error = None
    except tx.errors.XformError as raised:
        error = type(raised).__name__, str(raised)
    torch.testing.assert_close(handle.state_dict("adapter"), before, rtol=0, atol=0)
    return error


def test_a_file_missing_on_one_rank_is_an_error_on_both(ranks, tmp_path):
    (first, told), (second, cause) = ranks.run(load, str(tmp_path))
    assert (first, second) == ("ParallelError", "CheckpointError")
    assert "missing.safetensors" in cause
    assert "missing.safetensors" in told
