"""Training through Accelerate on two ranks against the same loop in plain PyTorch in one process (U02, U14, U21)."""

import os

import pytest
import torch
import torch.nn.functional as F

from thunder_xform.testing import RankPool, Traffic, torchrun_environment

STEPS = 3


class Net(torch.nn.Module):
    """Odd sizes, so that shards are uneven, a parameter of the root and a buffer that forward uses."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 7)
        self.down = torch.nn.Linear(7, 3)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.linspace(-1, 1, 3))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale + self.offset


def made(seed=3):
    torch.manual_seed(seed)
    return Net()


def batches(accumulation, world=2):
    """``[step][microbatch][rank]`` of inputs and targets."""
    generator = torch.Generator().manual_seed(5)
    return [
        [
            [(torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)) for _ in range(world)]
            for _ in range(accumulation)
        ]
        for _ in range(STEPS)
    ]


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def plain(accumulation, clip=None):
    """Losses ``[rank][call]``, norms, final weights and optimizer state, of eager PyTorch over all ranks' data."""
    model = made()
    optimizer = optimizer_of(model.parameters())
    losses, norms = [[], []], []
    for step in batches(accumulation):
        for microbatch in step:
            found = [F.mse_loss(model(x), y) / accumulation for x, y in microbatch]
            (sum(found) / 2).backward()
            for rank, loss in enumerate(found):
                losses[rank].append(loss.item() * accumulation)
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict(), optimizer.state_dict()


def accelerator_on_this_rank(accumulation=1, **kwargs):
    """An Accelerator in a process whose process group exists: as under ``accelerate launch`` on the CPU."""
    from accelerate.state import AcceleratorState, GradientState

    import thunder_xform_accelerate

    os.environ.update(torchrun_environment(), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if "gradient_accumulation_plugin" not in kwargs:
        kwargs["gradient_accumulation_steps"] = accumulation
    return thunder_xform_accelerate.Accelerator(cpu=True, **kwargs)


def jitted(names, model, options=None):
    import thunder

    import thunder_xform as tx

    return thunder.jit(model, transforms=tx.registry.resolve(names, options=options or {}))


def fit(accelerator, model, optimizer, accumulation, clip=None):
    """Train as Accelerate's guide does; returns losses, norms and the gradient collectives of each call."""
    losses, norms, counts = [], [], []
    for step in batches(accumulation):
        for microbatch in step:
            x, y = microbatch[accelerator.process_index]
            with accelerator.accumulate(model):
                with Traffic() as traffic:
                    loss = F.mse_loss(model(x), y)
                    accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            counts.append(traffic.count("all_reduce", "reduce_scatter"))
    return losses, norms, counts


def close(found, expected, tolerance=1e-6):
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, abs=tolerance), f"rank {rank}"


def same_tensors(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


# -- training --------------------------------------------------------------------------------------------------------


def train(name, accumulation, from_plain, clip=None, each=False):
    from accelerate.utils import GradientAccumulationPlugin

    more = {}
    if each:
        more["gradient_accumulation_plugin"] = GradientAccumulationPlugin(num_steps=accumulation, sync_each_batch=True)
    accelerator = accelerator_on_this_rank(accumulation, **more)
    net = made()
    model = jitted([name], net)
    optimizer = optimizer_of((net if from_plain else model).parameters())
    prepared, optimizer = accelerator.prepare(model, optimizer)
    losses, norms, counts = fit(accelerator, prepared, optimizer, accumulation, clip)
    kept = prepared is model and accelerator.unwrap_model(prepared) is model
    return losses, norms, counts, accelerator.get_state_dict(prepared), optimizer.state_dict(), kept


@pytest.mark.parametrize(
    ("name", "accumulation", "from_plain", "clip"),
    [
        ("ddp", 1, True, None),
        ("ddp", 4, False, None),
        ("fsdp", 1, False, None),
        ("fsdp", 4, True, None),
        ("fsdp", 2, False, 0.05),
    ],
)
def test_training_equals_plain_pytorch(ranks, name, accumulation, from_plain, clip):
    losses, norms, weights, state = plain(accumulation, clip)
    results = ranks.run(train, name, accumulation, from_plain, clip)
    close([found for found, *_ in results], losses)
    for _, found_norms, counts, full, full_state, kept in results:
        assert kept
        assert found_norms == pytest.approx(norms, abs=1e-6)
        # One bucket holds all: gradients travel in the last microbatch of a step and in no other.
        assert counts == STEPS * ([0] * (accumulation - 1) + [1])
        same_tensors(full, weights)
        for number, slots in state["state"].items():
            same_tensors(full_state["state"][number], slots)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_sync_each_batch(ranks, name):
    losses, _, weights, _ = plain(4)
    results = ranks.run(train, name, 4, False, each=True)
    close([found for found, *_ in results], losses)
    for _, _, counts, full, *_ in results:
        assert counts == STEPS * 4 * [1]
        same_tensors(full, weights)


def train_bf16(name):
    accelerator = accelerator_on_this_rank(mixed_precision="bf16")
    model = jitted([name], made())
    model, optimizer = accelerator.prepare(model, optimizer_of(model.parameters()))
    outputs = model(batches(1)[0][0][0][0])
    return fit(accelerator, model, optimizer, 1)[0], outputs.dtype


def test_mixed_precision(ranks):
    losses = plain(1)[0]
    results = ranks.run(train_bf16, "fsdp")
    # bfloat16 has 8 bits of precision.
    close([found for found, _ in results], losses, tolerance=0.05)
    assert any(abs(a - b) > 1e-6 for a, b in zip(results[0][0], losses[0], strict=True))
    assert {dtype for _, dtype in results} == {torch.float32}


# -- state -----------------------------------------------------------------------------------------------------------


def steps(model, optimizer, count, accelerator=None):
    """Every rank sees the same data, so that the number of ranks does not matter."""
    torch.manual_seed(11)
    losses = []
    for _ in range(count):
        loss = F.mse_loss(model(torch.randn(5, 4)), torch.randn(5, 3))
        accelerator.backward(loss) if accelerator else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def built(names, seed, options):
    accelerator = accelerator_on_this_rank()
    model = jitted(names, made(seed), options)
    optimizer = optimizer_of(p for p in model.parameters() if p.requires_grad)
    return accelerator, *accelerator.prepare(model, optimizer)


def save(names, path, options=None):
    accelerator, model, optimizer = built(names, 3, options)
    steps(model, optimizer, 2, accelerator)
    accelerator.save_state(path)
    full = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    return steps(model, optimizer, 2, accelerator), full


def resume(names, path, options=None):
    accelerator, model, optimizer = built(names, 100, options)
    accelerator.load_state(path)
    return steps(model, optimizer, 2, accelerator)


@pytest.fixture(scope="module")
def one():
    with RankPool(1) as pool:
        yield pool


@pytest.mark.parametrize("names", [["ddp"], ["fsdp"], ["lora", "fsdp"]])
def test_state_resumes_in_any_number_of_processes(ranks, one, names, tmp_path):
    """U21: whole tensors in the files, not this rank's shards; adapters apart, so that training resumes exactly."""
    options = {"lora": {"r": 2}} if "lora" in names else None
    (continued, full), _ = ranks.run(save, names, tmp_path, options)
    for losses in (*ranks.run(resume, names, tmp_path, options), *one.run(resume, names, tmp_path, options)):
        assert losses == pytest.approx(continued, abs=1e-6)
    model = made(100)
    model.load_state_dict(full)
    torch.manual_seed(11)
    assert F.mse_loss(model(torch.randn(5, 4)), torch.randn(5, 3)).item() == pytest.approx(continued[0], abs=1e-6)
    if names == ["fsdp"]:
        from safetensors.torch import load_file

        same_tensors(load_file(tmp_path / "model.safetensors"), full)


# -- what is refused -------------------------------------------------------------------------------------------------


def refused():
    import accelerate

    messages = {}

    def attempt(name, action):
        try:
            action()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"

    accelerator = accelerator_on_this_rank()
    attempt("accelerate's own", lambda: accelerate.Accelerator(cpu=True).prepare(jitted(["fsdp"], made())))
    attempt("no synchronization", lambda: accelerator.prepare(jitted(["lora"], made(), {"lora": {"r": 2}})))
    net = made()
    model = jitted(["fsdp"], net)
    optimizer = optimizer_of(net.parameters())
    F.mse_loss(net(torch.randn(5, 4)), torch.randn(5, 3)).backward()
    optimizer.step()
    attempt("optimizer that stepped", lambda: accelerator.prepare(model, optimizer))
    model = accelerator.prepare(jitted(["fsdp"], made()))
    F.mse_loss(model(torch.randn(5, 4)), torch.randn(5, 3)).backward()
    attempt("part of a model", lambda: accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0))
    other = torch.nn.Linear(4, 4)
    wrapped = accelerator.prepare(other)
    messages["others as ever"] = type(wrapped).__name__
    return messages


def test_what_is_refused(ranks):
    for messages in ranks.run(refused):
        expected = {
            "accelerate's own": "PipelineError: Accelerate would wrap this transformed model in torch's DDP",
            "no synchronization": "PipelineError: 2 processes train with lora, which synchronizes no gradients",
            "optimizer that stepped": "PipelineError: AdamW was built from the plain model and has taken steps already",
            "part of a model": "PipelineError: clip_grad_norm_ got 1 gradients, but the transformed model has 5",
            "others as ever": "DistributedDataParallel",
        }
        for case, start in expected.items():
            assert messages.get(case, "no error").startswith(start), case
