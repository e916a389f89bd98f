"""Continue a prompt with the model and the adapter that train.py left, in a process of its own.

python examples/generate.py runs/demo --prompt "The for statement"
"""

import argparse
import json
from pathlib import Path

import thunder_xform as tx

import thunder
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from gpt import GPT, Config


def main() -> None:
    args = arguments().parse_args()
    gpt, window = load_base(args.folder / "base.safetensors")

    adapter = args.folder / "adapter.safetensors"
    pipeline = tx.registry.resolve(tx.checkpoint.adapter_request(adapter))
    model = thunder.jit(gpt, transforms=pipeline)
    tx.checkpoint.load_adapter(tx.handle(model), adapter)

    for title, network in ("Base model", gpt), ("With the adapter", model):
        print(f"--- {title}\n{generate(network, args, window)}\n")


def load_base(path: Path) -> tuple[GPT, int]:
    with safe_open(path, framework="pt") as file:
        config = Config(**json.loads(file.metadata()["config"]))
    gpt = GPT(config)
    load_model(gpt, path)
    return gpt, config.window


@torch.no_grad()
def generate(network: nn.Module, args: argparse.Namespace, window: int) -> str:
    """The prompt and `args.length` more bytes, sampled.

    The network always sees a full window, so that it is compiled once; what lies behind the last byte is
    padding that causal attention never looks at.
    """
    network.eval()
    generator = torch.Generator().manual_seed(args.seed)
    text = list(args.prompt.encode() or b"\n")
    for _ in range(args.length):
        seen = text[-window:]
        tokens = torch.tensor([seen + [0] * (window - len(seen))])
        logits = network(tokens)[0, len(seen) - 1]
        probabilities = (logits / args.temperature).softmax(-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def arguments() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, help="where train.py left its files")
    parser.add_argument("--prompt", default='The "for" statement')
    parser.add_argument("--length", type=int, default=240, help="bytes to generate")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
