"""A small text encoder with random weights, as files of a BERT model, and texts for it."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from tasks.contracts.conversion import ImportedProgram, PreparedRows
from tasks.contracts.release import RegisteredProgram
from tasks.imports.config import EncoderConfig
from tasks.imports.program import export_encoder
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tests.support.data.builders import version_ref

SHAPE = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
}
WORDS = ("red", "blue", "green", "cat", "dog", "bird", "runs", "sleeps", "sings", "the", "a", "on")
MOST_TOKENS = 24


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the names that a BERT checkpoint gives them."""
    generator = torch.Generator().manual_seed(seed)
    width, inner = 32, 64

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    made = {
        "embeddings.word_embeddings.weight": normal(60, width),
        "embeddings.position_embeddings.weight": normal(MOST_TOKENS, width) * 0.2,
        "embeddings.token_type_embeddings.weight": normal(2, width),
        "embeddings.position_ids": torch.arange(MOST_TOKENS)[None],
        "pooler.dense.weight": normal(width, width),
    }
    sizes = {
        "attention.self.query": (width, width),
        "attention.self.key": (width, width),
        "attention.self.value": (width, width),
        "attention.output.dense": (width, width),
        "intermediate.dense": (inner, width),
        "output.dense": (width, inner),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(2):
        for name, shape in sizes.items():
            made[f"encoder.layer.{layer}.{name}.weight"] = normal(*shape)
            made[f"encoder.layer.{layer}.{name}.bias"] = normal(shape[0]) * 0.1
        norms += [
            f"encoder.layer.{layer}.{part}.LayerNorm" for part in ("attention.output", "output")
        ]
    for name in norms:
        made[f"{name}.weight"] = torch.ones(width)
        made[f"{name}.bias"] = torch.zeros(width)
    return made


def write_encoder(folder: Path, seed: int = 0, **changes: object) -> EncoderConfig:
    """Files of a small encoder, with a tokenizer that knows `WORDS`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    save_file(tensors(seed), folder / "model.safetensors")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    vocabulary |= {word: position for position, word in enumerate(WORDS, start=4)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    return EncoderConfig(folder=folder, max_tokens=MOST_TOKENS)


def texts(count: int, seed: int = 0) -> list[str]:
    """Different texts of 4 to 12 words."""
    rng = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(rng.choice(WORDS, rng.integers(4, 13)))] = None
    return list(found)


def program(store: ArtifactStore, folder: Path, seed: int = 0) -> ImportedProgram:
    """The exported program of a small encoder."""
    return export_encoder(write_encoder(folder, seed), store)


def registered(store: ArtifactStore, folder_name: str, seed: int = 0) -> RegisteredProgram:
    """The program of a small encoder, as the registry room hands it on."""
    imported = program(store, store.root.parent / folder_name, seed)
    version = version_ref(
        imported.program.sha256, imported.origin_sha256, name="encoder", version=1
    )
    return RegisteredProgram(
        version=version,
        program=imported.program,
        family=imported.family,
        signature=imported.signature,
    )


def prepared(store: ArtifactStore, num_judged: int = 40, num_calibration: int = 24) -> PreparedRows:
    """Token ids of random texts, as the preparation of a corpus gives them."""
    rng = np.random.default_rng(0)
    ids = [
        [2, *(int(token) for token in rng.integers(4, 60, rng.integers(2, 15))), 3]
        for _ in range(num_judged + num_calibration)
    ]
    parts = ["judged"] * num_judged + ["calibration"] * num_calibration

    def build(folder: StagedFolder) -> PreparedRows:
        pq.write_table(pa.table({"part": parts, "input_ids": ids}), folder.path / "texts.parquet")
        return PreparedRows(
            data=folder.artifact("texts.parquet"),
            num_calibration=num_calibration,
            num_judged=num_judged,
            made_from={"words": "1"},
        )

    return store.build_once("corpora", f"{num_judged}-{num_calibration}", PreparedRows, build)
