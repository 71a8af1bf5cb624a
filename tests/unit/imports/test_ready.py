from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.contracts.conversion import Signature
from tasks.imports.config import ProgramConfig, RowsConfig
from tasks.imports.program import take_program
from tasks.imports.rows import take_rows
from tasks.kernel.errors import DataContractError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore

SIGNATURE = Signature.model_validate(
    {
        "inputs": [{"name": "pixels", "dtype": "uint8", "shape": ["batch", 28, 28]}],
        "output": {"name": "logits", "dtype": "float32", "shape": ["batch", 10]},
    }
)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def _rows(tmp_path: Path, **columns: list[object]) -> RowsConfig:
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    return RowsConfig(file=tmp_path / "rows.parquet")


def test_a_program_is_taken_as_it_is_once(tmp_path: Path, store: ArtifactStore) -> None:
    file = tmp_path / "digits.pt2"
    file.write_bytes(b"a program")
    config = ProgramConfig(
        file=file, family="pictures", signature=SIGNATURE, origin={"package": "digits"}
    )
    taken = take_program(config, store)
    assert take_program(config, store) == taken
    assert store.num_builds == 1
    assert store.path(taken.program).read_bytes() == b"a program"
    assert taken.files == {"digits.pt2": digest_of(file)}
    assert (taken.family, taken.signature) == ("pictures", SIGNATURE)


def test_rows_are_taken_with_the_count_of_their_parts(tmp_path: Path, store: ArtifactStore) -> None:
    config = _rows(tmp_path, part=["judged", "calibration", "judged"], x=[1, 2, 3])
    rows = take_rows(config, store)
    assert (rows.num_calibration, rows.num_judged) == (1, 2)
    assert rows.made_from == {"rows.parquet": digest_of(config.file)}
    assert store.path(rows.data).read_bytes() == config.file.read_bytes()


@pytest.mark.parametrize(
    "columns", [{"x": [1]}, {"part": ["judged"]}, {"part": ["calibration", None]}]
)
def test_rows_without_both_parts_are_refused(
    tmp_path: Path, store: ArtifactStore, columns: dict[str, list[object]]
) -> None:
    with pytest.raises(DataContractError, match="expected some of each"):
        take_rows(_rows(tmp_path, **columns), store)
