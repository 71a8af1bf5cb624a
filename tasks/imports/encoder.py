"""A BERT encoder whose answer is one embedding of length 1 for each text, and its files.

Masked mean pooling and normalisation are part of the network, so every exported format gives the
embedding itself. It stays within the range of 16-bit floats. Its parts bear the names of a BERT
checkpoint, which is read without unpickling and without importing the package that carries it.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import PositiveFloat, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from tasks.imports.config import EncoderConfig, digest_in, find_package
from tasks.kernel.errors import ArtifactError, ConfigurationError
from tasks.kernel.files import digest_of
from tasks.kernel.values import Frozen

SHAPE_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
FILES = (SHAPE_FILE, WEIGHTS_FILE, TOKENIZER_FILE)
EXPECTED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
HIDDEN = -1e4
"""Added to the attention that padding would get: e to it is 0, and 16 bits hold it."""
SHORTEST = 1e-4
"""Least length that an embedding is divided by; the smallest normal 16-bit float is 6e-5."""


class EncoderShape(Frozen):
    """Sizes of a BERT encoder, named as its `config.json` names them."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    type_vocab_size: PositiveInt
    layer_norm_eps: PositiveFloat = 1e-12

    def norm(self) -> nn.LayerNorm:
        """Normalises vectors of the hidden size."""
        return nn.LayerNorm(self.hidden_size, eps=self.layer_norm_eps)

    def block(self, taken: int) -> nn.ModuleDict:
        """What brings vectors of another size back to the hidden one; see `_added`."""
        return nn.ModuleDict(
            {"dense": nn.Linear(taken, self.hidden_size), "LayerNorm": self.norm()}
        )


def _added(block: nn.ModuleDict, values: Tensor, to: Tensor) -> Tensor:
    lowered: Tensor = block["LayerNorm"](to + block["dense"](values))
    return lowered


class Layer(nn.Module):
    """Self-attention with several heads and a perceptron, in products that every format has."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        width, self.num_heads = shape.hidden_size, shape.num_attention_heads
        heads = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(heads), "output": shape.block(width)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, shape.intermediate_size)})
        self.output = shape.block(shape.intermediate_size)

    def forward(self, values: Tensor, hidden: Tensor) -> Tensor:
        """Mix each token with the others; `hidden` (batch, 1, 1, seq) is added to their scores."""
        attention: Any = self.attention
        query, key, value = (
            part(values).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in attention["self"].values()
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1]) + hidden
        mixed = (torch.softmax(scores, dim=-1) @ value).transpose(1, 2).flatten(2)
        attended = _added(attention["output"], mixed, values)
        return _added(self.output, functional.gelu(self.intermediate["dense"](attended)), attended)


class TextEncoder(nn.Module):
    """Token ids and mask in, one embedding of length 1 a text out."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        sizes = {
            "word_embeddings": shape.vocab_size,
            "position_embeddings": shape.max_position_embeddings,
            "token_type_embeddings": shape.type_vocab_size,
        }
        tables = {name: nn.Embedding(size, shape.hidden_size) for name, size in sizes.items()}
        self.embeddings = nn.ModuleDict({**tables, "LayerNorm": shape.norm()})
        layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Both int64 of shape (batch, seq), the mask 1 for tokens; float32 (batch, hidden)."""
        tables: Any = self.embeddings
        layers: Any = self.encoder["layer"]
        mask = attention_mask.to(torch.float32)
        hidden = (1.0 - mask)[:, None, None, :] * HIDDEN
        places = tables["position_embeddings"].weight[: input_ids.shape[1]]
        kind = tables["token_type_embeddings"].weight[0]  # there is one kind of text
        values = tables["LayerNorm"](tables["word_embeddings"](input_ids) + places + kind)
        for layer in layers:
            values = layer(values, hidden)
        mean = (values * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1.0)
        length = torch.linalg.vector_norm(mean, dim=1, keepdim=True)
        unit: Tensor = mean / length.clamp(min=SHORTEST)
        return unit


class EncoderFiles(NamedTuple):
    """The files of an encoder, their SHA-256, and what tells where they come from."""

    folder: Path
    digests: dict[str, str]
    origin: dict[str, str]


def find_files(config: EncoderConfig) -> EncoderFiles:
    """Locate the encoder's files.

    Raises:
        ConfigurationError: the package is not installed, or a file is not there.
        ArtifactError: a file was changed after its package was installed.
    """
    folder, origin = config.folder, dict[str, str]()
    package = find_package(config.package) if config.package is not None else None
    if package is not None:
        folder = Path(str(package.locate_file(config.folder)))
        origin = {"package": str(config.package), "version": package.version}
        for field in ("License", "License-Expression"):
            if field in package.metadata:
                origin["licence"] = package.metadata[field]
    if absent := [name for name in FILES if not (folder / name).is_file()]:
        raise ConfigurationError(
            f"{config.folder} of {config.package or 'this machine'} lacks {', '.join(absent)}; "
            f"expected the files of a BERT encoder: {', '.join(FILES)}"
        )
    digests = {
        name: digest_in(package, config.folder / name) if package else digest_of(folder / name)
        for name in FILES
    }
    return EncoderFiles(folder, digests, origin)


def read_encoder(files: EncoderFiles) -> tuple[TextEncoder, EncoderShape]:
    """The network with its trained weights, ready to be exported.

    Raises:
        ConfigurationError: it is no encoder of the kind that is built here.
        ArtifactError: the weights are damaged, or are those of another network.
    """
    shape = _shape(files)
    network = TextEncoder(shape)
    try:
        network.load_state_dict(
            {
                name.removeprefix("bert."): t
                for name, t in load_file(files.folder / WEIGHTS_FILE).items()
                if not re.search(r"pooler\.|embeddings\.position_ids|cls\.", name)
            }
        )
    except (SafetensorError, OSError, RuntimeError) as exc:
        reason = " ".join(str(exc).split())[:300]
        raise ArtifactError(
            f"{WEIGHTS_FILE} cannot be read, or does not fit {SHAPE_FILE}: {reason}. Install the "
            "files of one model again"
        ) from exc
    return network.eval(), shape


def _shape(files: EncoderFiles) -> EncoderShape:
    try:
        values = json.loads((files.folder / SHAPE_FILE).read_text(encoding="utf-8"))
        shape = EncoderShape.model_validate(values)
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as exc:
        raise ConfigurationError(f"{SHAPE_FILE} describes no BERT encoder: {exc}") from exc
    if other := {k: v for k, e in EXPECTED.items() if (v := values.get(k, e)) != e}:
        raise ConfigurationError(
            f"{SHAPE_FILE} says {other}, expected {EXPECTED}. Export this network to a .pt2 "
            "program elsewhere and import that"
        )
    return shape
