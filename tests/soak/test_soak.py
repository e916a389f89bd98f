"""Random models through random pipelines and schedules, step by step against eager PyTorch.

CI runs a fixed number of examples, always the same. `make soak` runs many others; SOAK_EXAMPLES says how many.
"""

import copy
import os
from importlib.util import find_spec

import pytest
import thunder
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import thunder_xform as tx
from thunder_xform.testing.models import LAYERS, LayerStack

TOLERANCE = 2e-5
SCALING = 2.0
LONG = int(os.environ.get("SOAK_EXAMPLES", "0"))
INSTALLED = [name for name in ("lora", "quant", "aten", "ddp", "fsdp") if find_spec(f"thunder_xform_{name}")]

model_specs = st.fixed_dictionaries(
    {
        "layers": st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
        "width": st.sampled_from([3, 4, 7]),
        "tokens": st.booleans(),
        "tied": st.booleans(),
    }
)
#: What happens to a model, in order. A training step has as many microbatches as it names ways to run them.
schedules = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.lists(st.sampled_from(["sync", "no_sync"]), max_size=2)),
        st.tuples(st.sampled_from(["evaluate", "reload", "longer"]), st.just([])),
    ),
    min_size=1,
    max_size=4,
)


def pipelines(*, distributed):
    """Requests with options, of plugins that are installed."""
    local = [name for name in ("lora", "quant", "aten") if name in INSTALLED]
    spread = [name for name in ("ddp", "fsdp") if name in INSTALLED]
    return st.fixed_dictionaries(
        {
            "names": st.tuples(
                st.sets(st.sampled_from(local)).map(sorted) if local else st.just([]),
                st.sampled_from(spread) if distributed else st.just(""),
            ).map(lambda drawn: [*drawn[0], *filter(None, drawn[1:])]),
            "zero": st.sampled_from([2, 3]),
            "units": st.sampled_from(["block", "layer", "none"]),
        }
    )


def resolve(pipeline, *, tied):
    options = {
        # What a tied layer computes with an adapter, no plain model with tied weights does.
        "lora": {"r": 2, "lora_alpha": 2 * SCALING, "exclude_modules": ["head"] if tied else None},
        "quant": {"scheme": "int8"},
        "fsdp": {"zero": pipeline["zero"], "units": pipeline["units"]},
        "ddp": {"bucket_cap_mb": 1e-4},
    }
    names = pipeline["names"]
    return tx.registry.resolve(names, options={name: options[name] for name in names if name in options})


class Reference:
    """The eager model that the transformed one should equal, with the adapters as plain tensors beside it."""

    def __init__(self, plain, model, quantized):
        self.model = copy.deepcopy(plain)
        self.handle = tx.handle(model)
        self.adapters = {}
        if quantized:
            # The weights that int8 stands for; how far from the model's own is asserted once, here.
            held = self.handle.state_dict()
            for name, tensor in self.model.state_dict().items():
                bound = tensor.abs().max() / 127 if tensor.ndim == 2 else 0.0
                assert (held[name] - tensor).abs().max() <= bound, name
            self.model.load_state_dict(held)
            self.model.requires_grad_(False)
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name in self.handle.parameters and self.handle.parameters[name].requires_grad)
        if adapters := self.handle.state_dict("adapter") if "lora" in self.handle.pipeline else {}:
            self.model.requires_grad_(False)
            generator = torch.Generator().manual_seed(5)
            drawn = {name: 0.2 * torch.randn(t.shape, generator=generator) for name, t in adapters.items()}
            self.handle.load_state_dict(drawn, kind="adapter")
            self.adapters = {name: tensor.requires_grad_() for name, tensor in drawn.items()}
            for path in sorted({name.split(".lora_")[0] for name in drawn}):
                self.model.get_submodule(path).register_forward_hook(self._adapted(path))

    def _adapted(self, path):
        a, b = (self.adapters[f"{path}.lora_{part}.default.weight"] for part in "AB")
        return lambda module, inputs, output: output + inputs[0] @ a.T @ b.T * SCALING

    def trained(self):
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return {**own, **self.adapters}

    def average_gradients(self):
        if dist.is_initialized() and {"ddp", "fsdp"} & set(self.handle.pipeline):
            for parameter in self.trained().values():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()


def whole(handle, name, tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else handle.whole(name, tensor)


def close(found, wanted, what):
    torch.testing.assert_close(
        found.detach(), wanted.detach(), atol=TOLERANCE, rtol=TOLERANCE, msg=lambda text: f"{what}\n{text}"
    )


def run(spec, pipeline, schedule):
    """One example: every output, gradient, buffer and parameter after every step equals eager's."""
    torch.manual_seed(3)
    plain = LayerStack(spec["layers"], spec["width"], tokens=spec["tokens"], tied=spec["tied"])
    model = thunder.jit(plain, transforms=resolve(pipeline, tied=spec["tokens"] and spec["tied"]))
    handle = tx.handle(model)
    reference = Reference(plain, model, "quant" in pipeline["names"])
    ours = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.trained().values(), lr=0.05, momentum=0.9)
    time, rank = 4, dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(7 + rank)
    for number, (action, ways) in enumerate(schedule):
        where = f"step {number} ({action} {ways})"
        if action == "longer":
            time += 1
        elif action == "evaluate":
            model.eval(), reference.model.eval()
            batch = plain.example(2, time)
            with torch.no_grad():
                close(model(batch), reference.model(batch), f"output of {where}")
            model.train(), reference.model.train()
        elif action == "reload":
            kind = "sharded" if "quant" in pipeline["names"] or reference.adapters else "full"
            kept = {name: tensor.clone() for name, tensor in handle.state_dict(kind).items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point():
                        parameter.zero_()
            handle.load_state_dict(kept, kind)
        else:
            train(model, reference, plain, [*ways, "sync"], time, where)
            ours.step(), theirs.step()
            ours.zero_grad(), theirs.zero_grad()
        for name, parameter in handle.parameters.items():
            if name in reference.trained():
                close(whole(handle, name, parameter.detach()), reference.trained()[name], f"{name} after {where}")
        for name, buffer in reference.model.named_buffers():
            close(dict(model.named_buffers())[name], buffer, f"buffer {name} after {where}")


def train(model, reference, plain, ways, time, where):
    for way in ways:
        batch = plain.example(2, time)
        if way == "no_sync":
            with model.no_sync():
                output = model(batch)
                output.square().mean().backward()
        else:
            output = model(batch)
            output.square().mean().backward()
        expected = reference.model(batch)
        expected.square().mean().backward()
        close(output, expected, f"output of {where}")
    reference.average_gradients()
    parameters = reference.handle.parameters
    for name, wanted in reference.trained().items():
        found = parameters[name].grad
        assert (found is None) == (wanted.grad is None), f"gradient of {name} in {where}: {found}, {wanted.grad}"
        if found is not None:
            close(whole(reference.handle, name, found), wanted.grad, f"gradient of {name} in {where}")


def examples_of(*, distributed):
    return st.tuples(model_specs, pipelines(distributed=distributed), schedules)


def soak(number):
    return settings(
        max_examples=LONG or number,
        derandomize=not LONG,
        deadline=None,
        # Shrinking compiles a model for every attempt: worth it in a long run only.
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if LONG else [])],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.timeout(86400 if LONG else 300)
@soak(15)
@given(examples_of(distributed=False))
def test_one_process(example):
    note(f"{example}")
    run(*example)


@pytest.mark.skipif(not {"ddp", "fsdp"} & set(INSTALLED), reason="needs a plugin that distributes")
@pytest.mark.timeout(86400 if LONG else 300)
@soak(12)
@given(examples_of(distributed=True))
def test_two_ranks(ranks, example):
    note(f"{example}")
    ranks.run(run, *example)
