"""LoRA fine-tuning of a sharded GPT through Lightning Fabric, with gradient accumulation.

    python examples/fabric_finetune.py --devices 2

Needs thunder-xform-fabric, thunder-xform-fsdp and thunder-xform-lora.
"""

import argparse
from pathlib import Path

import thunder_xform_fabric
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

import text
from gpt import GPT, Config
from windows import Windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches per step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("runs/fabric"))
    args = parser.parse_args()

    strategy = thunder_xform_fabric.ThunderFSDPStrategy(
        transforms=["lora"], options={"lora": {"r": 8, "lora_alpha": 32}}, state_dict_type="sharded"
    )
    fabric = Fabric(accelerator="cpu", devices=args.devices, strategy=strategy)
    fabric.launch()

    torch.manual_seed(0)
    model = fabric.setup(GPT(Config(window=64, layers=args.layers, width=args.width)))
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(adapters, lr=1e-2))

    batches = Windows(text.language_reference(), 64).random(size=8, seed=fabric.global_rank)
    for step in range(args.steps):
        total = 0.0
        for microbatch in range(args.accumulate):
            tokens, targets = next(batches)
            # Gradients of all microbatches but the last stay on their rank: one reduction per step.
            with fabric.no_backward_sync(model, enabled=microbatch < args.accumulate - 1):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / args.accumulate
                fabric.backward(loss)
            total += loss.item()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step + 1}: loss {fabric.all_reduce(total):.3f}")

    fabric.save(args.out / "checkpoint", {"model": model, "optimizer": optimizer, "steps": args.steps})
    fabric.print(f"saved {args.out / 'checkpoint'}")


if __name__ == "__main__":
    main()
