"""Two ranks, each with its own initialization and data, against eager PyTorch in one process over the data of both.

U10: 4-bit weights with DDP or FSDP, with LoRA on top, with other parameters training. The reference's weights are
quantized and dequantized by bitsandbytes, or by the definition of int8, not by this package.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import thunder_xform as tx

for _plugin in ("aten", "ddp", "fsdp", "lora"):
    pytest.importorskip(f"thunder_xform_{_plugin}", reason=f"needs the plugin {_plugin}")

TOLERANCE = {"atol": 1e-6, "rtol": 1e-5}
SCALING = 2.0


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.up = torch.nn.Linear(64, 192)
        # 7 rows: the ranks' shards differ.
        self.down = torch.nn.Linear(192, 7, bias=False)
        self.lm_head = torch.nn.Linear(7, 9)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return self.lm_head(self.down(torch.nn.functional.silu(self.up(x))))


PACKED = ("up", "down")
ADAPTED = (*PACKED, "lm_head")
LORA = {"r": 2, "lora_alpha": 2 * SCALING, "target_modules": ADAPTED}


class Adapted(torch.nn.Module):
    def __init__(self, base, a, b):
        super().__init__()
        self.base = base
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T * SCALING


def made(seed):
    torch.manual_seed(seed)
    return Net()


def on_the_grid(weight, scheme, double_quant):
    """The weight after quantization, from the outside."""
    if scheme == "int8":
        step = weight.abs().amax(1, keepdim=True) / 127
        return (weight / step).round() * step
    import bitsandbytes.functional as functional

    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type=scheme, compress_statistics=double_quant)
    return functional.dequantize_4bit(codes, state)


def adapters():
    shapes = made(11)
    found = {}
    for path in ADAPTED:
        layer = shapes.get_submodule(path)
        found[f"{path}.lora_A.default.weight"] = torch.randn(2, layer.in_features) / 8
        found[f"{path}.lora_B.default.weight"] = torch.randn(layer.out_features, 2) / 8
    return found


def reference(names, quant):
    """Rank 0's model with what the plugins are to do to it; parameters that train, by the compiled model's names."""
    model = made(100)
    state = {}
    if "quant" in names:
        with torch.no_grad():
            for path in PACKED:
                weight = model.get_submodule(path).weight
                weight.copy_(on_the_grid(weight, quant.get("scheme", "nf4"), quant.get("double_quant", False)))
                weight.requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if "lora" not in names:
        return model, {n: p for n, p in model.named_parameters() if p.requires_grad}, state
    trained = {}
    model.requires_grad_(False)
    values = adapters()
    for path in ADAPTED:
        keys = [f"{path}.lora_{which}.default.weight" for which in "AB"]
        a, b = (values[key] for key in keys)
        layer = Adapted(model.get_submodule(path), a, b)
        setattr(model, path, layer)
        trained |= dict(zip(keys, (layer.a, layer.b), strict=True))
        state[f"{path}.weight"] += SCALING * b @ a
    return model, trained, state


def batches(count):
    torch.manual_seed(7)
    return [[torch.randint(0, 9, (2, 4)) for _ in range(dist.get_world_size())] for _ in range(count)]


def compiled(names, options):
    import thunder

    plain = made(100 + dist.get_rank())
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    chosen = {"lora": LORA} | options
    pipeline = tx.registry.resolve(list(names), options={n: chosen[n] for n in names if n in chosen})
    model = thunder.jit(plain, transforms=pipeline)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} of the user's module changed"
    if "lora" in names:
        tx.handle(model).load_state_dict(adapters(), kind="adapter")
    return model


def agrees(names, options):
    """Two microbatches without synchronization and one with it: outputs, gradients and the full state."""
    import thunder

    model = compiled(names, options)
    plain, trained, state = reference(names, options.get("quant", {}))
    for number, per_rank in enumerate(batches(3)):
        with model.no_sync() if number < 2 else contextlib.nullcontext():
            output = model(per_rank[dist.get_rank()])
            output.square().mean().backward()
        outputs = [plain(tokens) for tokens in per_rank]
        torch.testing.assert_close(output, outputs[dist.get_rank()], **TOLERANCE)
        (sum(o.square().mean() for o in outputs) / len(outputs)).backward()
    ran = {bsym.sym.name for bsym in thunder.last_traces(model)[-1].bound_symbols}
    assert ({"aten_attention", "aten_layer_norm", "aten_silu"} <= ran) == ("aten" in names)
    found = tx.handle(model).parameters
    assert {name for name, p in found.items() if p.requires_grad} == trained.keys()
    for name, parameter in trained.items():
        gradient = found[name].grad
        assert gradient is not None, f"{name} has no gradient"
        expected = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        torch.testing.assert_close(gradient, expected, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
    full = tx.handle(model).state_dict()
    assert full.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(full[name], tensor, **TOLERANCE)
    made(0).load_state_dict(full)


SUBSETS = [
    (*some, parallel, *kernels)
    for parallel in ("fsdp", "ddp")
    for some in ((), ("quant",), ("lora",), ("quant", "lora"))
    for kernels in ((), ("aten",))
]


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_u10_subsets_equal_eager(ranks, names):
    ranks.run(agrees, names, {})


@pytest.mark.parametrize("names", [n for n in SUBSETS if len(n) > 1], ids="+".join)
def test_the_order_of_the_request_does_not_matter(names):
    orders = {tx.registry.plan(list(order)).order for order in itertools.permutations(names)}
    assert orders == {names}


def test_fsdp_and_ddp_over_the_same_ranks_are_refused():
    for order in itertools.permutations(("quant", "lora", "fsdp", "ddp")):
        with pytest.raises(tx.errors.ConflictError, match="process_group"):
            tx.registry.plan(list(order))


@pytest.mark.parametrize(
    ("quant", "fsdp"),
    [
        ({"scheme": "int8"}, {"zero": 2}),
        ({"double_quant": True}, {"zero": 2, "units": "layer"}),
        ({"scheme": "fp4", "double_quant": True}, {"units": "none", "reduce_each_microbatch": True}),
    ],
    ids=str,
)
def test_schemes_zero_2_and_3_and_units(ranks, quant, fsdp):
    ranks.run(agrees, ("quant", "lora", "fsdp"), {"quant": quant, "fsdp": fsdp})


class Received(TorchDispatchMode):
    """Bytes that this rank gets from the other, by dtype."""

    def __init__(self):
        super().__init__()
        self.nbytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "c10d::recv_":
            for tensor in args[0]:
                self.nbytes[str(tensor.dtype)] = self.nbytes.get(str(tensor.dtype), 0) + tensor.nbytes
        return func(*args, **(kwargs or {}))


def traffic():
    """Bytes received in one forward and backward of a frozen base with adapters."""
    results = {}
    for label, names, quant in (
        ("float32", ("lora", "fsdp"), {}),
        ("int8", ("quant", "lora", "fsdp"), {"scheme": "int8"}),
        ("nf4", ("quant", "lora", "fsdp"), {"scheme": "nf4"}),
        ("nf4, double", ("quant", "lora", "fsdp"), {"scheme": "nf4", "double_quant": True}),
    ):
        model = compiled(names, {"quant": quant, "fsdp": {"zero": 3}})
        tokens = batches(1)[0][0]
        model(tokens).sum().backward()
        with Received() as received:
            model(tokens).sum().backward()
        results[label] = received.nbytes
    return results


def test_packed_weights_travel_packed(ranks):
    per_rank = ranks.run(traffic)
    # Of two ranks, each gets what the other holds: both together get everything once.
    found = {
        label: {dtype: sum(rank[label].get(dtype, 0) for rank in per_rank) for dtype in per_rank[0][label]}
        for label in per_rank[0]
    }
    shapes = ((192, 64), (7, 192))  # up and down
    weights = sum(out * size for out, size in shapes)
    blocks = sum(out * size // 64 for out, size in shapes)
    # Gathered for the forward and for the backward.
    packed = {"int8": 2 * weights, "nf4": weights, "nf4, double": weights + 2 * blocks}
    whole = found["float32"]["torch.float32"]
    for label, size in packed.items():
        dtype = "torch.int8" if label == "int8" else "torch.uint8"
        assert found[label][dtype] == size, label
    scales = {"int8": 2 * 4 * sum(out for out, _ in shapes), "nf4": 2 * 4 * blocks, "nf4, double": 0}
    for label, size in scales.items():
        assert found[label]["torch.float32"] == whole - 2 * 4 * weights + size, label
        saved = 2 * 4 * weights / (packed[label] + size)
        print(f"{label}: {saved:.2f} times fewer bytes for weights than float32")


def one_bad_weight():
    import thunder

    model = made(100)
    if dist.get_rank() == 1:
        model.up.weight.data[3, 3] = float("nan")
    with pytest.raises(tx.errors.XformError) as caught:
        thunder.jit(model, transforms=tx.registry.resolve(["quant", "fsdp"]))
    return str(caught.value)


def test_a_weight_that_one_rank_cannot_quantize_stops_all_ranks(ranks):
    messages = ranks.run(one_bad_weight)
    assert all("'up.weight'" in message for message in messages), messages
