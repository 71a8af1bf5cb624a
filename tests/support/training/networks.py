"""A small transformer that says how it is cut over ranks: for tensor and pipeline parallel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.base import Cut, cut_evenly

VOCABULARY = 50
TOKENS = 32


class Attention(nn.Module):
    """Self-attention over as many heads as its weights have, all or a part of them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.queries = nn.Linear(width, width)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, rows: Tensor) -> Tensor:
        heads = [
            layer(rows).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        ]
        mixed = functional.scaled_dot_product_attention(*heads)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """A transformer layer with normalisation first, and dropout between the linear layers."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.second_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(4 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows + self.attention(self.first_norm(rows))
        hidden: Tensor = self.down(self.dropout(functional.gelu(self.up(self.second_norm(rows)))))
        return rows + hidden


class Entry(nn.Module):
    """Tokens and their places to vectors; a buffer scales them."""

    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(TOKENS, width) * 0.02)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.scale * self.tokens(tokens) + self.places
        return vectors


class Head(nn.Module):
    """One logit for each sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.linear(rows.mean(dim=1)).squeeze(1)
        return logits


class Transformer(nn.Module):
    """Some layers over 32 tokens; the standard size is two layers of width 256."""

    def __init__(
        self, width: int = 256, num_layers: int = 2, num_heads: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.entry = Entry(width)
        self.layers = nn.ModuleList(Layer(width, num_heads, dropout) for _ in range(num_layers))
        self.head = Head(width)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.entry(tokens)
        for layer in self.layers:
            rows = layer(rows)
        logits: Tensor = self.head(rows)
        return logits

    def tensor_parallel_plan(self, num_parts: int) -> dict[str, Cut]:
        if self.num_heads % num_parts:
            raise ConfigurationError(
                f"{self.num_heads} attention heads do not divide over {num_parts} ranks"
            )
        cuts: dict[str, Cut] = {
            "attention.queries": "outputs",
            "attention.keys": "outputs",
            "attention.values": "outputs",
            "attention.out": "inputs",
            "up": "outputs",
            "dropout": "units",
            "down": "inputs",
        }
        return {
            f"layers.{number}.{name}": cut
            for number in range(len(self.layers))
            for name, cut in cuts.items()
        }

    def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
        return stages_of([self.entry, *self.layers, self.head], num_stages)


def stages_of(blocks: Iterable[nn.Module], num_stages: int) -> list[nn.Module]:
    """Blocks in stages of about as many parameters each."""
    in_order = list(blocks)
    if num_stages > len(in_order):
        raise ConfigurationError(f"{len(in_order)} blocks do not make {num_stages} stages")
    sizes = [sum(p.numel() for p in block.parameters()) for block in in_order]
    return [Chain(in_order[part]) for part in cut_evenly(sizes, num_stages)]


class Chain(nn.Module):
    """Blocks one after the other; the first may take several inputs."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *inputs: Tensor) -> Tensor:
        first, *others = self.blocks
        rows: Tensor = first(*inputs)
        for block in others:
            rows = block(rows)
        return rows
