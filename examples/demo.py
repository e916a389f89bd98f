"""The whole demo: train.py on two processes through torchrun, then generate.py in a fresh process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import options

HERE = Path(__file__).parent
RANKS = 2


def main() -> None:
    started = time.monotonic()
    args = options.parse(__doc__)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
    run(*torchrun, f"--nproc-per-node={RANKS}", HERE / "train.py", "--check", *sys.argv[1:])
    run(HERE / "generate.py", args.out)
    print(f"{args.out} has {', '.join(sorted(file.name for file in args.out.iterdir()))}")
    print(f"The demo took {time.monotonic() - started:.0f} s.")


def run(*arguments: str | Path) -> None:
    """Run Python in a process of its own; end with its status if it fails."""
    cores = len(os.sched_getaffinity(0))
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, cores // RANKS)),
        "PYTHONWARNINGS": "ignore:transformer_engine module not found",
    }
    done = subprocess.run([sys.executable, *arguments], env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
