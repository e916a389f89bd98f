"""LoRA: this project's `lora` plugin against PEFT, on one job, with float32 and with nf4 base weights.

    python benchmarks/lora.py                     # tokens/s and peak memory, float32 base, with and without `aten`
    python benchmarks/lora.py --quant nf4         # both bases; bitsandbytes under PEFT, the `quant` plugin here
    python benchmarks/lora.py --torchcompile      # also through torch's Inductor, which the memory cannot be seen of

Both train the same GPT on the same tokens with AdamW, from the same adapters; the losses that they reach are printed.
By itself Thunder takes attention, norms and activations apart into small operators on CPU, plugin or not; `aten` puts
PyTorch's kernels in their place. With `--torchcompile` each runs through torch's Inductor, too: PEFT under
`torch.compile`, the plugin with Thunder's executors `sdpa` and `torchcompile`.
Steps of all variants alternate, so a machine that slows down slows all of them; the ratios are taken step by step
against PEFT on the same base and printed as median [quartiles]. Memory is the peak of live tensors in one step, with
those of the model, its adapters and the optimizer; it does not depend on the allocator.
"""

from __future__ import annotations

import thunder_xform as tx  # Before Thunder.

# isort: split

import argparse
import copy
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

from thunder_xform.testing.memory import LiveBytes

import thunder
import torch
from peft import LoraConfig, get_peft_model
from thunder_xform_lora import load_peft

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, Config

PLAIN = {"lora": ([], None), "lora + aten": (["aten"], None)}
INDUCTOR = {"lora, Inductor": ([], ["sdpa", "torchcompile"])}


class Job:
    """One variant: a model with adapters, and its optimizer."""

    def __init__(self, model: torch.nn.Module, tokens: torch.Tensor) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        self.tokens = tokens

    def step(self) -> float:
        logits = self.model(self.tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def peak(self) -> int:
        """Largest number of bytes alive in one step."""
        state = [v for slots in self.optimizer.state.values() for v in slots.values() if isinstance(v, torch.Tensor)]
        # bitsandbytes keeps scales beside its parameters.
        scales = [p.quant_state.absmax for p in self.model.parameters() if getattr(p, "quant_state", None) is not None]
        with LiveBytes() as live:
            live.track([*self.model.parameters(), *self.model.buffers(), *state, *scales])
            self.step()
        return live.peak


def in_four_bits(model: torch.nn.Module) -> torch.nn.Module:
    """The model with bitsandbytes' linear layers, as transformers makes them for PEFT."""
    import bitsandbytes

    for path, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and path != "head":
            bias = layer.bias is not None
            packed = bitsandbytes.nn.Linear4bit(
                layer.in_features, layer.out_features, bias, compress_statistics=False, quant_type="nf4"
            )
            packed.load_state_dict(layer.state_dict())
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, packed.to(layer.weight.device))
    return model


def jobs(args: argparse.Namespace, base: str, folder: Path) -> dict[str, Job]:
    """PEFT's variant, and this project's with the adapters of PEFT's."""
    torch.manual_seed(0)
    model = GPT(Config(args.vocabulary, args.window, args.layers, args.heads, args.width, tied=False))
    tokens = torch.randint(0, args.vocabulary, (args.batch, args.window + 1))
    names = [path.rpartition(".")[2] for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    options = {"r": args.rank, "lora_alpha": 2 * args.rank, "target_modules": sorted({*names} - {"head"})}
    below = in_four_bits(copy.deepcopy(model)) if base == "nf4" else copy.deepcopy(model)
    reference = get_peft_model(below, LoraConfig(**options))
    reference.save_pretrained(folder)
    request = {"lora": options}
    if base == "nf4":
        request["quant"] = {"scheme": "nf4", "exclude_modules": ["head"], "release_originals": True}
    found = {"PEFT": Job(reference, tokens)}
    if args.torchcompile:
        found["PEFT, Inductor"] = Job(torch.compile(copy.deepcopy(reference)), tokens)
    for name, (others, executors) in (PLAIN | (INDUCTOR if args.torchcompile else {})).items():
        pipeline = tx.registry.resolve([*request, *others], options=request)
        compiled = thunder.jit(copy.deepcopy(model), transforms=pipeline, executors=executors)
        load_peft(tx.handle(compiled), folder)
        found[name] = Job(compiled, tokens)
    return found


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f} {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "layers": 4,
        "width": 256,
        "heads": 4,
        "vocabulary": 1024,
        "window": 128,
        "batch": 4,
        "rank": 8,
        "threads": 1,
        "steps": 15,
        "warmup": 2,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quant", choices=["nf4"], default=None, help="add variants whose base weights have four bits")
    parser.add_argument("--torchcompile", action="store_true", help="add variants that run through torch's Inductor")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    variants: dict[tuple[str, str], Job] = {}
    for base in ["float32", *([args.quant] if args.quant else [])]:
        with tempfile.TemporaryDirectory() as folder:
            variants |= {(base, name): job for name, job in jobs(args, base, Path(folder)).items()}
    seconds: dict[tuple[str, str], list[float]] = {variant: [] for variant in variants}
    losses: dict[tuple[str, str], float] = {}
    for number in range(args.warmup + args.steps):
        for variant, job in variants.items():
            start = time.perf_counter()
            losses[variant] = job.step()
            if number >= args.warmup:
                seconds[variant].append(time.perf_counter() - start)
    print(f"{'base':10}{'variant':22}{'tokens/s':>10}   {'ratio to PEFT':24}{'peak':>10}   loss")
    for (base, name), job in variants.items():
        spent = seconds[base, name]
        ratios = [theirs / ours for ours, theirs in zip(spent, seconds[base, "PEFT"], strict=True)]
        speed = args.batch * args.window / statistics.median(spent)
        loss = losses[base, name]
        peak = "" if name.endswith("Inductor") else f"{job.peak() / 2**20:.1f} MiB"
        print(f"{base:10}{name:22}{speed:10.0f}   {spread(ratios):24}{peak:>10}   {loss:.6f}")


if __name__ == "__main__":
    main()
