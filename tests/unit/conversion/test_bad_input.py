"""What comes in broken: each gives a sentence, leaves nothing half-written, and spoils no other."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tasks.contracts.base import Artifact
from tasks.contracts.conversion import tabular_signature
from tasks.contracts.data import DatasetSchema
from tasks.conversion.targets.pytorch import check_program, load_program
from tasks.evaluation.scoring import Program
from tasks.kernel.errors import ArtifactError, ConversionError
from tests.support.conversion.programs import SmallNetwork, exported
from tests.support.data.builders import COLUMNS


@pytest.fixture(scope="module")
def program_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    path.write_bytes(exported(SmallNetwork()))
    return path


class _WritesAFile:
    """Runs when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def _changed(source: Path, target: Path, ending: str, change: bytes) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change if name.endswith(ending) else old.read(name))
    return target


def _scored(path: Path) -> object:
    """The same file, as it is opened to be evaluated."""
    artifact = Artifact(uri="programs/1/t.pt2", sha256="0" * 64, num_bytes=1)
    return Program.open(artifact, COLUMNS, SimpleNamespace(path=lambda _: path))


@pytest.mark.parametrize("read", [load_program, _scored])
def test_a_program_with_a_pickled_object_is_refused_before_it_runs(
    program_file: Path, tmp_path: Path, read: Callable[[Path], object]
) -> None:
    trace = tmp_path / "was-here"
    content = tmp_path / "payload.pt"
    torch.save((_WritesAFile(trace),), content)
    tampered = _changed(program_file, tmp_path / "t.pt2", "model.pt", content.read_bytes())
    with pytest.raises(ArtifactError, match="unpickling can run any code"):
        read(tampered)
    assert not trace.exists()


def test_a_program_that_marks_a_weight_as_pickled_is_refused(
    program_file: Path, tmp_path: Path
) -> None:
    entry = {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"table": entry}}).encode()
    tampered = _changed(program_file, tmp_path / "t.pt2", "weights_config.json", config)
    with pytest.raises(ArtifactError, match=r"weights_config\.json"):
        load_program(tampered)


@pytest.mark.parametrize("content", [b"", b"no archive", pickle.dumps({"a": 1}), None])
def test_a_file_that_is_no_program_is_refused_with_a_sentence(
    content: bytes | None, tmp_path: Path, program_file: Path
) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(program_file.read_bytes()[:-400] if content is None else content)
    with pytest.raises(ArtifactError, match=r"cannot be read as a torch\.export program"):
        load_program(path)


def test_a_program_of_other_columns_is_refused(program_file: Path) -> None:
    fewer = DatasetSchema(**{**COLUMNS.model_dump(), "numeric": COLUMNS.numeric[:-1]})
    with pytest.raises(ConversionError, match=r"\['any', 5\].* says .*\['any', 4\]"):
        check_program(load_program(program_file), tabular_signature(fewer))
