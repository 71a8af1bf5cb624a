"""From an encoder's files to a program in the artifact store, with both axes of any length."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import torch

from tasks.contracts.conversion import BATCH_AXIS, ImportedProgram, Signature, TensorSpec
from tasks.imports.config import EncoderConfig
from tasks.imports.network import EncoderShape, TextEncoder
from tasks.imports.weights import FILES, find_files, read_encoder
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

PROGRAM_FILE = "program.pt2"
FAMILY = "text-embedding"
SEQUENCE_AXIS = "seq"
OUTPUT = "embedding_unit"
MOST_ROWS = 4096
"""Texts of one call of the exported program."""


def export_encoder(config: EncoderConfig, store: ArtifactStore) -> ImportedProgram:
    """Build the encoder's program, or return the one that was built from the same files.

    Raises:
        ConfigurationError: the files are not there, are of another kind of network, or it takes
            fewer tokens than are asked for.
        ArtifactError: the weights are damaged.
        StorageError: the disk refused a write.
    """
    found = find_files(config)
    digests = {name: digest_of(found.folder / name) for name in FILES}
    settings = {"max_tokens": str(config.max_tokens), "max_rows": str(MOST_ROWS)}
    origin = {**found.origin, **settings, "torch": torch.__version__}
    key = content_key("encoder", code_digest(__file__), digests, origin)

    def build(folder: StagedFolder) -> ImportedProgram:
        network, shape = read_encoder(found)
        _write_program(network, shape, config, folder.path / PROGRAM_FILE)
        return ImportedProgram(
            program=folder.artifact(PROGRAM_FILE),
            family=FAMILY,
            signature=_signature(shape, config),
            origin=origin,
            files=digests,
            origin_sha256=hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest(),
        )

    return store.build_once("programs", key, ImportedProgram, build)


def _write_program(
    network: TextEncoder, shape: EncoderShape, config: EncoderConfig, path: Path
) -> None:
    if config.max_tokens > shape.max_position_embeddings:
        raise ConfigurationError(
            f"max_tokens={config.max_tokens}, but the encoder has positions for "
            f"{shape.max_position_embeddings} tokens only"
        )
    # Lengths of the example are neither 0 nor 1: the exporter would take these for constants.
    example = (torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))
    axes = {
        0: torch.export.Dim(BATCH_AXIS, min=1, max=MOST_ROWS),
        1: torch.export.Dim(SEQUENCE_AXIS, min=1, max=config.max_tokens),
    }
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        program = torch.export.export(
            network, example, dynamic_shapes={"input_ids": axes, "attention_mask": axes}
        )
        torch.export.save(program, path)


def _signature(shape: EncoderShape, config: EncoderConfig) -> Signature:
    axes = (BATCH_AXIS, SEQUENCE_AXIS)
    return Signature(
        inputs=(
            TensorSpec(name="input_ids", dtype="int64", shape=axes),
            TensorSpec(name="attention_mask", dtype="int64", shape=axes),
        ),
        output=TensorSpec(name=OUTPUT, dtype="float32", shape=(BATCH_AXIS, shape.hidden_size)),
        largest={BATCH_AXIS: MOST_ROWS, SEQUENCE_AXIS: config.max_tokens},
    )
