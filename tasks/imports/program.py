"""Programs that were made elsewhere, into the artifact store: an encoder's files, or a `.pt2`."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import torch

from tasks.contracts.conversion import BATCH_AXIS, ImportedProgram, Signature, TensorSpec
from tasks.governance.signing import build_signed, check_import
from tasks.imports.config import EncoderConfig, ProgramConfig
from tasks.imports.encoder import EncoderShape, TextEncoder, find_files, read_encoder
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

PROGRAM_FILE = "program.pt2"
SEQUENCE_AXIS = "seq"
OUTPUT = "embedding_unit"
MOST_ROWS = 4096
"""Texts of one call of the exported program."""


def take_program(config: ProgramConfig, store: ArtifactStore) -> ImportedProgram:
    """Copy a program that was exported elsewhere. Whether it is one, its conversion finds out.

    Raises:
        ConfigurationError: the file is not there.
        SignatureError: it is not what its publisher signed, or nobody trusts that one; or somebody
            else made the copy in the store.
        StorageError: the disk refused a write.
    """
    digests = {config.file.name: digest_of_file(config.file)}
    origin = {**config.origin, **check_import(store.root.parent, config.file.parent, digests)}
    key = content_key("taken", code_digest(__file__), config, digests, origin)

    def build(folder: StagedFolder) -> ImportedProgram:
        shutil.copyfile(config.file, folder.path / PROGRAM_FILE)
        return _imported(folder, config.family, config.signature, origin, digests)

    return build_signed(store, "programs", key, ImportedProgram, build)


def digest_of_file(file: Path) -> str:
    """SHA-256 of a file that is to be imported.

    Raises:
        ConfigurationError: it is not there.
    """
    if not file.is_file():
        seen = "is a folder" if file.is_dir() else "does not exist"
        raise ConfigurationError(
            f"{file.absolute()} {seen}; name a file that is to be imported. A relative path starts "
            "at the folder that the import was started in"
        )
    return digest_of(file)


def _imported(
    folder: StagedFolder,
    family: str,
    signature: Signature,
    origin: dict[str, str],
    digests: dict[str, str],
) -> ImportedProgram:
    return ImportedProgram(
        program=folder.artifact(PROGRAM_FILE),
        family=family,
        signature=signature,
        origin=origin,
        files=digests,
        origin_sha256=hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest(),
    )


def export_encoder(config: EncoderConfig, store: ArtifactStore) -> ImportedProgram:
    """Build the encoder's program, or return the one that was built from the same files.

    Raises:
        ConfigurationError: the files are not there, are of another kind of network, or it takes
            fewer tokens than are asked for.
        ArtifactError: the weights are damaged, or a package's are not as they were installed.
        SignatureError: they are not what their publisher signed, or nobody trusts that one; or
            somebody else made what was built of them.
        StorageError: the disk refused a write.
    """
    found = find_files(config)
    settings = {"max_tokens": str(config.max_tokens), "max_rows": str(MOST_ROWS)}
    signed = check_import(store.root.parent, found.folder, found.digests)
    origin = {**found.origin, **settings, "torch": torch.__version__, **signed}
    key = content_key("encoder", code_digest(__file__), found.digests, origin)

    def build(folder: StagedFolder) -> ImportedProgram:
        network, shape = read_encoder(found)
        signature = _signature(shape, config)
        _write_program(network, signature, folder.path / PROGRAM_FILE)
        return _imported(folder, "text-embedding", signature, origin, found.digests)

    return build_signed(store, "programs", key, ImportedProgram, build)


def _signature(shape: EncoderShape, config: EncoderConfig) -> Signature:
    if config.max_tokens > shape.max_position_embeddings:
        raise ConfigurationError(
            f"max_tokens={config.max_tokens}, but the encoder has positions for "
            f"{shape.max_position_embeddings} tokens only"
        )
    axes = (BATCH_AXIS, SEQUENCE_AXIS)
    return Signature(
        inputs=tuple(
            TensorSpec(name=name, dtype="int64", shape=axes)
            for name in ("input_ids", "attention_mask")
        ),
        output=TensorSpec(name=OUTPUT, dtype="float32", shape=(BATCH_AXIS, shape.hidden_size)),
        largest={BATCH_AXIS: MOST_ROWS, SEQUENCE_AXIS: config.max_tokens},
    )


def _write_program(network: TextEncoder, signature: Signature, path: Path) -> None:
    # Lengths of the example are neither 0 nor 1: the exporter would take these for constants.
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in signature.inputs)
    dims = [torch.export.Dim(axis, min=1, max=most) for axis, most in signature.largest.items()]
    axes = dict(enumerate(dims))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        program = torch.export.export(
            network, example, dynamic_shapes={spec.name: axes for spec in signature.inputs}
        )
        torch.export.save(program, path)
