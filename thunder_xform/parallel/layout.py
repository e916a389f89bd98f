"""How a bucket of parameters is cut into dim-0 shards and laid out in flat buffers.

Every parameter is cut along its first dimension as ``torch.chunk`` and DTensor's ``Shard(0)`` cut it: each rank gets
``ceil(rows / n)`` rows, the last ones fewer or none. In flat buffers each piece has the size of a full cut, so that all
ranks' pieces are equally long; the surplus is padding. A buffer for the whole bucket is rank-major: the shard of rank
0, then that of rank 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class _Piece:
    shape: tuple[int, ...]
    rows: int
    row_numel: int
    offset: int

    @property
    def numel(self) -> int:
        return self.rows * self.row_numel

    def rows_of(self, rank: int) -> int:
        total = self.shape[0] if self.shape else 1
        return max(0, min(self.rows, total - rank * self.rows))


class ShardLayout:
    """Layout of tensors of the given shapes over ``world`` ranks.

    Attributes:
        shard_numel: elements of one rank's flat shard, padding included.
        padded: whether any rank has padding.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], world: int) -> None:
        self.world = world
        offset = 0
        pieces: list[_Piece] = []
        for shape in shapes:
            # A scalar counts as one row.
            rows = math.ceil((shape[0] if shape else 1) / world)
            pieces.append(_Piece(tuple(shape), rows, math.prod(shape[1:]), offset))
            offset += pieces[-1].numel
        self._pieces = tuple(pieces)
        self.shard_numel = offset
        self.padded = any(sum(p.rows_of(r) for r in range(world)) != p.rows * world for p in pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def shard_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Shape of the shard that ``rank`` holds of tensor ``index``."""
        piece = self._pieces[index]
        return (piece.rows_of(rank), *piece.shape[1:])

    def whole_shape(self, index: int) -> tuple[int, ...]:
        """Shape of the whole tensor ``index``."""
        return self._pieces[index].shape

    def local(self, flat: torch.Tensor, index: int, rank: int) -> torch.Tensor:
        """View of the shard of tensor ``index`` in the flat shard of ``rank``."""
        piece = self._pieces[index]
        length = piece.rows_of(rank) * piece.row_numel
        return flat.narrow(0, piece.offset, length).view(self.shard_shape(index, rank))

    def whole(self, flats: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """Tensor ``index`` out of the flat shards of all ranks; a view if there is one rank."""
        shards = [self.local(flat, index, rank) for rank, flat in enumerate(flats)]
        joined = torch.cat(shards) if len(shards) > 1 else shards[0]
        return joined.view(self._pieces[index].shape)

    def pack(self, full: torch.Tensor, tensors: Iterable[tuple[int, torch.Tensor]], *, add: bool) -> None:
        """Write whole tensors, given with their indices, into the rank-major buffer ``full``, or add them to it."""
        by_rank = full.view(self.world, self.shard_numel)
        for index, tensor in tensors:
            piece = self._pieces[index]
            target = by_rank.narrow(1, piece.offset, piece.numel)
            if self._total(piece) == piece.rows * self.world:
                _write(target, tensor.reshape(self.world, piece.numel), add)
                continue
            flat, start = tensor.reshape(-1), 0
            for rank in range(self.world):
                length = piece.rows_of(rank) * piece.row_numel
                _write(target[rank, :length], flat[start : start + length], add)
                start += length

    def cut(self, tensor: torch.Tensor, index: int, rank: int) -> torch.Tensor:
        """The rows of the whole ``tensor`` that ``rank`` holds, as a view."""
        piece = self._pieces[index]
        rows = tensor.reshape(1) if not piece.shape else tensor
        start = min(rank * piece.rows, rows.shape[0])
        return rows.narrow(0, start, piece.rows_of(rank))

    @staticmethod
    def _total(piece: _Piece) -> int:
        return piece.shape[0] if piece.shape else 1


def _write(target: torch.Tensor, source: torch.Tensor, add: bool) -> None:
    if add:
        target.add_(source)
    else:
        target.copy_(source)
