"""V31, V35: what does not fit is refused under `fsdp`, on all ranks, before any rank has changed anything."""

import pytest
import torch
import torch.distributed as dist

import thunder_xform as tx

pytest.importorskip("thunder_xform_lora", reason="needs the plugin lora")


def attempts(folder):
    """For each bad load: error and text, and whether the model stayed as it was."""
    import thunder
    from safetensors.torch import load_file, save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from thunder_xform_lora import load_peft, save_peft

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 5))
    handle = tx.handle(thunder.jit(plain, transforms=tx.registry.resolve("lora(r=3) + fsdp")))
    a, b = "0.lora_A.default.weight", "0.lora_B.default.weight"
    good = {kind: {n: t.clone() for n, t in handle.state_dict(kind).items()} for kind in ("adapter", "full", "sharded")}
    stored = {name: handle._session.ledger.tensor(name).detach().clone() for name in handle._session.ledger}
    tx.checkpoint.save_adapter(handle, f"{folder}/good.safetensors")
    save_peft(handle, f"{folder}/peft")
    dist.barrier()
    found = {}

    def attempt(name, load):
        try:
            load()
            error = None
        except Exception as raised:
            error = type(raised).__name__, str(raised)
        same = all(torch.equal(handle._session.ledger.tensor(n), t) for n, t in stored.items())
        found[name] = (error, same)

    def of(kind, name, value, only=None):
        # A new value for every other tensor: whatever is written of a refused state is seen.
        state = {n: t + 1 for n, t in good[kind].items()}
        if only is None or dist.get_rank() == only:
            state[name] = value
        return lambda: handle.load_state_dict(state, kind)

    for rows in (1, 2, 4, 9):
        attempt(f"adapter of {rows} rows", of("adapter", a, torch.ones(rows, 4)))
    attempt("adapter with other columns", of("adapter", b, torch.ones(6, 4)))
    attempt("full of 7 rows", of("full", "0.weight", torch.ones(7, 4)))
    attempt("sharded of 7 rows", of("sharded", "0.weight", torch.ones(7, 4)))
    attempt("sparse", of("full", "1.bias", torch.ones(5).to_sparse()))
    attempt("csr", of("full", "1.weight", torch.ones(5, 6).to_sparse_csr()))
    attempt("quantized", of("full", "1.bias", torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8)))
    attempt("meta", of("full", "1.bias", torch.ones(5, device="meta")))
    attempt("nested", of("full", "1.bias", torch.nested.nested_tensor([torch.ones(5)])))
    attempt("no tensor", of("adapter", b, "text"))
    attempt("integers", of("full", "1.bias", torch.ones(5, dtype=torch.int32)))
    attempt("one rank", of("full", "1.bias", torch.ones(5).to_sparse(), only=1))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    attempt("mesh", of("sharded", "0.weight", distribute_tensor(torch.ones(6, 4), mesh["a"], [Shard(0)])))
    attempt("DTensor", of("full", "0.weight", distribute_tensor(torch.ones(6, 4), mesh["b"], [Replicate()])))

    if dist.get_rank() == 0:
        from safetensors import safe_open

        with safe_open(f"{folder}/good.safetensors", framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(f"{folder}/good.safetensors")
        save_file(tensors | {a: torch.ones(9, 4)}, f"{folder}/long.safetensors", metadata)
        key = "base_model.model.0.lora_A.weight"
        tensors = load_file(f"{folder}/peft/adapter_model.safetensors")
        save_file(tensors | {key: torch.ones(9, 4)}, f"{folder}/peft/adapter_model.safetensors")
    dist.barrier()
    attempt("load_adapter", lambda: tx.checkpoint.load_adapter(handle, f"{folder}/long.safetensors"))
    attempt("load_peft", lambda: load_peft(handle, f"{folder}/peft"))
    handle.load_state_dict({n: t + 1 for n, t in good["adapter"].items()}, "adapter")
    assert torch.equal(handle.state_dict("adapter")[a], good["adapter"][a] + 1)
    return found


REMEDY = "Load it into a model of the same architecture and options."
A = "'0.lora_A.default.weight' has shape ({}, 4) instead of (3, 4)"
TOLD = {
    **{f"adapter of {rows} rows": A.format(rows) for rows in (1, 2, 4, 9)},
    "adapter with other columns": "'0.lora_B.default.weight' has shape (6, 4) instead of (6, 3)",
    "full of 7 rows": "'0.weight' has shape (7, 4) instead of (6, 4)",
    "sharded of 7 rows": "'0.weight' has shape (7, 4) instead of (6, 4)",
    "sparse": "'1.bias' is torch.sparse_coo and no dense tensor",
    "csr": "'1.weight' is torch.sparse_csr and no dense tensor",
    "quantized": "'1.bias' is quantized (torch.qint8); its dequantize() is wanted",
    "meta": "'1.bias' is on the meta device and has no data",
    "nested": "'1.bias' is nested and no dense tensor",
    "no tensor": "'0.lora_B.default.weight' is of type str and no tensor",
    "integers": "'1.bias' is torch.int32, but the model holds torch.float32",
    "DTensor": "'0.weight' is a DTensor in (Replicate(),); its full_tensor() is wanted",
    "load_adapter": A.format(9),
    "load_peft": A.format(9),
}


def test_v31_v35_nothing_is_cut_or_half_loaded(ranks, tmp_path):
    results = ranks.run(attempts, str(tmp_path))
    for found in results:
        for name, told in TOLD.items():
            assert found[name] == (("CheckpointError", f"The state does not fit: {told}. {REMEDY}"), True), name
    (first, same), (second, same_too) = (found["one rank"] for found in results)
    assert (same, same_too) == (True, True)
    assert first[0] == "ParallelError"
    assert "rank 1: CheckpointError: The state does not fit: '1.bias' is torch.sparse_coo" in first[1]
    assert second[0] == "CheckpointError"
    for found in results:
        (kind, text), same = found["mesh"]
        assert (kind, same) == ("CheckpointError", True)
        assert text.startswith("'0.weight' is stored as (6, 4) in (Shard(dim=0),) over ")
