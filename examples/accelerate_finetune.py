"""Training of a sharded GPT through Hugging Face Accelerate, with gradient accumulation.

    torchrun --nproc-per-node 2 examples/accelerate_finetune.py

Needs thunder-xform-accelerate and thunder-xform-fsdp.
"""

import argparse
from pathlib import Path

import thunder_xform as tx

import thunder
import thunder_xform_accelerate
import torch
import torch.nn.functional as F

import text
from gpt import GPT, Config
from windows import Windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches per step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    args = parser.parse_args()

    accelerator = thunder_xform_accelerate.Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)

    torch.manual_seed(0)
    model = GPT(Config(window=64, layers=args.layers, width=args.width))
    model = thunder.jit(model, transforms=tx.registry.resolve(["fsdp"]))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))

    batches = Windows(text.language_reference(), 64).random(size=8, seed=accelerator.process_index)
    for step in range(args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            tokens, targets = next(batches)
            # Gradients of all microbatches but the last stay on their rank: one reduction per step.
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / args.accumulate
        mean = accelerator.reduce(torch.tensor(total), "mean").item()
        accelerator.print(f"step {step + 1}: loss {mean:.3f}")

    accelerator.save_state(args.out)
    accelerator.print(f"saved {args.out}")


if __name__ == "__main__":
    main()
