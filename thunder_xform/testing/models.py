"""Small models put together from a list of layers, for tests that try many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

#: Tokens that a model with an embedding knows.
VOCABULARY = 11


class _Residual(torch.nn.Module):
    """Two linear layers around an activation, which may write in place."""

    def __init__(self, width: int, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, width + 3)
        self.down = torch.nn.Linear(width + 3, width, bias=False)
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self._activation(self.up(x)))


class _Attention(torch.nn.Module):
    """Causal attention with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class _AcrossTime(torch.nn.Module):
    """A layer that wants (batch, width, time)."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x.transpose(1, 2)).transpose(1, 2)


class _Frozen(torch.nn.Module):
    """A linear layer whose weight does not train."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
        self.layer.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class _Counter(torch.nn.Module):
    """Counts its calls in a buffer that it assigns, and keeps a running mean in one that it updates in place."""

    calls: torch.Tensor
    mean: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))
        self.gain = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return (x - self.mean) * self.gain / (1 + 0.1 * self.calls)


class _InPlace(torch.nn.Module):
    """Operators in place on a layer's output and on a view of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
        self.shift = torch.nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y.add_(self.shift)
        y[..., 0].mul_(0.5)
        return x + torch.tanh(y)


#: Layers by name; each keeps the shape (batch, time, width).
LAYERS: Mapping[str, Callable[[int], torch.nn.Module]] = {
    "attention": _Attention,
    "batch norm": lambda width: _AcrossTime(torch.nn.BatchNorm1d(width)),
    "convolution": lambda width: _AcrossTime(torch.nn.Conv1d(width, width, 3, padding=1)),
    "counter": _Counter,
    "frozen": _Frozen,
    "gelu": lambda width: _Residual(width, functional.gelu),
    "in place": _InPlace,
    "layer norm": torch.nn.LayerNorm,
    "relu in place": lambda width: _Residual(width, torch.relu_),
    "rms norm": torch.nn.RMSNorm,
    "silu in place": lambda width: _Residual(width, lambda x: functional.silu(x, inplace=True)),
}


class LayerStack(torch.nn.Module):
    """Layers of :data:`LAYERS` between an input layer and two output layers.

    Args:
        layers: their names, in order.
        width: features between them.
        tokens: whether the input is token numbers (batch, time) for an embedding, else features
            (batch, time, width) for a linear layer.
        tied: with ``tokens``, whether the output layer has the embedding's weight.
    """

    def __init__(self, layers: Sequence[str], width: int, *, tokens: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.tokens = tokens
        self.width = width
        self.first = torch.nn.Embedding(VOCABULARY, width) if tokens else torch.nn.Linear(width, width)
        self.layers = torch.nn.ModuleList(LAYERS[name](width) for name in layers)
        self.last = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        if tokens and tied:
            self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.tanh(self.last(x)))

    def example(self, batch: int, time: int) -> torch.Tensor:
        """A random input."""
        if self.tokens:
            return torch.randint(0, VOCABULARY, (batch, time))
        return torch.randn(batch, time, self.width)
