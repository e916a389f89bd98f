"""Batches of windows over a text, byte by byte."""

from collections.abc import Iterator

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs and the tokens that follow them, both int64 of shape (size, window)."""


class Windows:
    """A text, every tenth block of it for validation; a token is a byte."""

    def __init__(self, text: str, window: int) -> None:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.window = window
        # Blocks from all over: a text's end is seldom like the rest of it.
        blocks = data.tensor_split(100 if len(data) > 100_000 else 10)
        self.training = torch.cat([block for i, block in enumerate(blocks) if i % 10 != 9])
        self.validation = torch.cat(blocks[9::10])

    def random(self, size: int, seed: int) -> Iterator[Batch]:
        """Batches from random places of the training part, without end."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self._batch(
                self.training, torch.randint(len(self.training) - self.window, (size,), generator=generator)
            )

    def spread(self, size: int, count: int, rank: int, world_size: int) -> list[Batch]:
        """`count` batches, evenly spread over the validation part; ranks get different ones."""
        last = len(self.validation) - self.window - 1
        starts = torch.linspace(0, last, size * count * world_size).long()
        return [self._batch(self.validation, chunk) for chunk in starts[rank::world_size].split(size)]

    def _batch(self, data: Tensor, starts: Tensor) -> Batch:
        windows = torch.stack([data[start : start + self.window + 1] for start in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
