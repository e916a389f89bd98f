"""The options of train.py and demo.py. Free of torch, so that demo.py refuses bad ones at once."""

import argparse
from importlib.util import find_spec
from pathlib import Path

import text


def parse(description: str) -> argparse.Namespace:
    """The command line, with the two texts read: `args.pretraining` and `args.finetuning`.

    Exits with a message if anything is wrong; no process group exists yet, so no rank waits for another.
    """
    parser = _parser(description)
    args = parser.parse_args()
    try:
        args.pretraining = text.load(args.text, "standard library", args.window)
        args.finetuning = text.load(args.finetune_text, "language reference", args.window)
        args.out.mkdir(parents=True, exist_ok=True)
    except text.TextError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{args.out} cannot be made: {error.strerror}. Name another folder: --out FOLDER")
    if args.width % args.heads:
        parser.error(f"{args.heads} heads do not divide a width of {args.width}. Change --width or --heads.")
    return args


def _parser(description: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)

    def add(name: str, default: object, help: str) -> None:
        kind = _positive if isinstance(default, int) else type(default)
        parser.add_argument(f"--{name}", metavar="N", type=kind, default=default, help=f"{help} (default: {default})")

    parser.add_argument("--text", metavar="FILE", help="train on this, not the standard library's sources")
    parser.add_argument("--finetune-text", metavar="FILE", help="fine-tune on this, not Python's help topics")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("runs/demo"))
    add("steps", 250, "steps of training")
    add("finetune-steps", 120, "steps of fine-tuning")
    add("lr", 2e-3, "peak learning rate of training")
    add("finetune-lr", 4e-3, "peak learning rate of fine-tuning")
    add("batch", 8, "windows in a batch, on each rank")
    add("accumulate", 1, "batches in a step; gradients are reduced with the last one")
    add("window", 128, "bytes that the model sees")
    add("layers", 2, "blocks of the model")
    add("heads", 4, "attention heads in a block")
    add("width", 192, "features of the model")
    add("seed", 1, "seed of weights and batches")
    scheme = "nf4" if find_spec("bitsandbytes") else "none"
    parser.add_argument(
        "--quant",
        choices=("none", "int8", "nf4", "fp4"),
        default=scheme,
        help=f"hold the base model's weights in few bits while fine-tuning (default here: {scheme})",
    )
    parser.add_argument("--check", action="store_true", help="compare what is compiled with eager PyTorch, once")
    parser.add_argument("--fail-at", metavar="RANK:STEP", help="raise there, to see how a crash is reported")
    return parser


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return number
