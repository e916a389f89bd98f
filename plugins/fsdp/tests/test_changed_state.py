"""State that changes in a forward, parts that are read, a plain model that is changed, under ddp and fsdp."""

import copy

import pytest
import torch

import thunder_xform as tx

pytest.importorskip("thunder_xform_ddp", reason="needs the plugin ddp")
pytest.importorskip("thunder_xform_lora", reason="needs the plugin lora")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = torch.nn.Linear(3, 5)
        self.head = torch.nn.Linear(5, 2)
        self.register_buffer("n", torch.zeros(()))
        self.enc.register_buffer("mean", torch.zeros(5))
        self.seen = 0

    def forward(self, x):
        h = self.enc(x)
        self.n = self.n + 1
        self.enc.mean = 0.5 * self.enc.mean + h.detach().mean(0)
        self.seen = x.shape[0]
        return self.head(h) * self.n + self.enc.mean.sum()


def message_of(attempt):
    try:
        attempt()
    except tx.errors.PipelineError as error:
        return str(error)
    return "no error"


def changed(request):
    """Two steps of two microbatches and an evaluation, next to eager PyTorch; then what is refused."""
    import thunder

    torch.manual_seed(0)
    plain = Net()
    model = thunder.jit(plain, transforms=tx.registry.resolve(request))
    handle = tx.handle(model)
    reference = copy.deepcopy(plain)
    reference.load_state_dict(handle.state_dict())
    untouched = copy.deepcopy(plain.state_dict())
    trains = "lora" not in request
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1 if trains else 0.0) for m in (model, reference)]
    for _ in range(2):
        batches = torch.randn(2, 4, 3)  # The same on all ranks: their mean is the gradient of one.
        with model.no_sync():
            model(batches[0]).square().mean().backward()
        model(batches[1]).square().mean().backward()
        for batch in batches:
            reference(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(batches[0]), reference.eval()(batches[0]), atol=1e-5, rtol=1e-5)
    state = handle.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-5)
    assert (state["n"].item(), model.seen) == (5, 4)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, untouched[name])
    part = "no value"
    with torch.no_grad():
        alone = message_of(lambda: model.enc(batches[0]))
        if alone == "no error":
            part = "eager's"
            torch.testing.assert_close(model.enc(batches[0]), reference.enc(batches[0]))
    found = {
        "part": part if alone == "no error" else alone,
        "part that trains": message_of(lambda: model.enc(batches[0])),
    }
    with torch.no_grad():
        plain.head.weight.mul_(2)
    found["plain changed"] = message_of(lambda: model(batches[0]))
    return found


PAST = "Running 'enc' of the transformed Net by itself would go past the transforms: {}. Call the model itself."
REWRITTEN = PAST.format("{} changed what the model computes")
EXPECTED = {
    "ddp": (
        "eager's",
        PAST.format("its gradients would not be reduced") + " Under torch.no_grad() the part runs alone, too.",
    ),
    "fsdp(zero=3)": (REWRITTEN.format("'fsdp'"),) * 2,
    "fsdp(zero=2) + lora(r=1)": (REWRITTEN.format("'lora', 'fsdp'"),) * 2,
}


@pytest.mark.parametrize("request_", EXPECTED)
def test_state_and_parts(ranks, request_):
    """V01, V02, V25."""
    for found in ranks.run(changed, request_):
        assert (found["part"], found["part that trains"]) == EXPECTED[request_]
        assert found["plain changed"].startswith("The plain model's 'head.weight' was given other values")
