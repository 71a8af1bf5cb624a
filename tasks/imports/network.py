"""A BERT encoder whose answer is one embedding of length 1 for each text.

Masked mean pooling and normalisation are part of the network, so every exported format gives the
embedding itself. Written so that it also stays within the range of 16-bit floats.
"""

from __future__ import annotations

import math

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

HIDDEN = -1e4
"""Added to the attention that padding would get: e to it is 0, and 16 bits hold it."""
SHORTEST = 1e-4
"""Least length that an embedding is divided by; the smallest normal 16-bit float is 6e-5."""


class EncoderShape(BaseModel):
    """Sizes of a BERT encoder, named as its `config.json` names them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    type_vocab_size: PositiveInt
    layer_norm_eps: PositiveFloat = 1e-12


class EmbeddedTokens(nn.Module):
    """Sum of the embeddings of token, position and kind of text; there is one kind."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.kinds = nn.Embedding(shape.type_vocab_size, shape.hidden_size)
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids of shape (batch, seq) to vectors of shape (batch, seq, hidden)."""
        places = self.positions.weight[: input_ids.shape[1]]
        summed: Tensor = self.norm(self.tokens(input_ids) + places + self.kinds.weight[0])
        return summed


class Attention(nn.Module):
    """Self-attention with several heads, in plain matrix products that every format has."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.num_heads = shape.num_attention_heads
        self.head_width = width // shape.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, values: Tensor, hidden: Tensor) -> Tensor:
        """Mix each token with the others; `hidden` (batch, 1, 1, seq) is added to their scores."""
        query, key, value = (
            self._heads(part(values)) for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_width) + hidden
        mixed = torch.softmax(scores, dim=-1) @ value
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    def _heads(self, values: Tensor) -> Tensor:
        rows, length, _ = values.shape
        return values.reshape(rows, length, self.num_heads, self.head_width).transpose(1, 2)


class Layer(nn.Module):
    """Attention and a perceptron, each added to what went in and normalised."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.attention_norm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.inner = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.outer = nn.Linear(shape.intermediate_size, shape.hidden_size)
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)

    def forward(self, values: Tensor, hidden: Tensor) -> Tensor:
        """As `Attention.forward`."""
        attended = self.attention_norm(values + self.attention(values, hidden))
        raised = functional.gelu(self.inner(attended))
        lowered: Tensor = self.norm(attended + self.outer(raised))
        return lowered


class TextEncoder(nn.Module):
    """Token ids and mask in, one embedding of length 1 a text out."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.embedded = EmbeddedTokens(shape)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Both int64 of shape (batch, seq), the mask 1 for tokens; float32 (batch, hidden)."""
        mask = attention_mask.to(torch.float32)
        hidden = (1.0 - mask)[:, None, None, :] * HIDDEN
        values = self.embedded(input_ids)
        for layer in self.layers:
            values = layer(values, hidden)
        summed = (values * mask[:, :, None]).sum(1)
        mean = summed / mask.sum(1, keepdim=True).clamp(min=1.0)
        length = torch.linalg.vector_norm(mean, dim=1, keepdim=True)
        unit: Tensor = mean / length.clamp(min=SHORTEST)
        return unit
