"""Programs and rows that are ready: taken into the artifact store as they are."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.contracts.conversion import ImportedProgram, PreparedRows
from tasks.imports.config import ProgramConfig, RowsConfig
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

PROGRAM_FILE = "program.pt2"
ROWS_FILE = "rows.parquet"
PARTS = ("calibration", "judged")


def take_program(config: ProgramConfig, store: ArtifactStore) -> ImportedProgram:
    """Copy a program that was exported elsewhere. Whether it is one, its conversion finds out.

    Raises:
        ConfigurationError: the file is not there.
        StorageError: the disk refused a write.
    """
    digests = {config.file.name: _digest(config.file)}
    key = content_key("taken", code_digest(__file__), config, digests)

    def build(folder: StagedFolder) -> ImportedProgram:
        shutil.copyfile(config.file, folder.path / PROGRAM_FILE)
        return ImportedProgram(
            program=folder.artifact(PROGRAM_FILE),
            family=config.family,
            signature=config.signature,
            origin=config.origin,
            files=digests,
            origin_sha256=hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest(),
        )

    return store.build_once("programs", key, ImportedProgram, build)


def take_rows(config: RowsConfig, store: ArtifactStore) -> PreparedRows:
    """Copy rows that were prepared elsewhere, and count their two parts.

    Raises:
        ConfigurationError: the file is not there, or is no Parquet.
        DataContractError: it lacks the column `part`, or one of the two parts.
        StorageError: the disk refused a write.
    """
    digest = _digest(config.file)
    key = content_key("taken", code_digest(__file__), config, digest)

    def build(folder: StagedFolder) -> PreparedRows:
        calibration, judged = _count_parts(config.file)
        shutil.copyfile(config.file, folder.path / ROWS_FILE)
        return PreparedRows(
            data=folder.artifact(ROWS_FILE),
            num_calibration=calibration,
            num_judged=judged,
            made_from={config.file.name: digest},
        )

    return store.build_once("corpora", key, PreparedRows, build)


def _digest(file: Path) -> str:
    if not file.is_file():
        seen = "is a folder" if file.is_dir() else "does not exist"
        raise ConfigurationError(
            f"{file.absolute()} {seen}; name a file that is to be imported. A relative path starts "
            "at the folder that the import was started in"
        )
    return digest_of(file)


def _count_parts(file: Path) -> list[int]:
    """Rows of each of `PARTS`."""
    try:
        with pq.ParquetFile(file) as opened:
            found = opened.read(columns=["part"])
    except pa.ArrowInvalid as exc:
        raise ConfigurationError(f"{file.name} is no Parquet file: {exc}") from exc
    parts = found["part"].to_pylist() if found.num_columns else []
    counts = [parts.count(part) for part in PARTS]
    if not all(counts):
        raise DataContractError(
            f"{file.name} has {counts} rows whose column 'part' is {' or '.join(PARTS)}; expected "
            "some of each"
        )
    return counts
