"""Golden batches of programs of several families, without a registry."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from serving.engine.golden import answer_golden_rows, gap, golden_batch
from tasks.contracts.base import Artifact
from tasks.contracts.conversion import Signature, TensorSpec
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.files import digest_of
from tests.support.conversion.cases import threads_as_before
from tests.support.data.builders import version_ref

__all__ = ["threads_as_before"]  # a fixture

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="tokens", dtype="int64", shape=("batch", "seq")),
        TensorSpec(name="gain", dtype="float32", shape=("batch",)),
    ),
    output=TensorSpec(name="classes", dtype="float32", shape=("batch", 3)),
    largest={"batch": 16, "seq": 4},
)


class Classes(nn.Module):
    """Knows 40 tokens; another one is an error."""

    def __init__(self, bad: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 3)
        self.bad = bad

    def forward(self, tokens: Tensor, gain: Tensor) -> Tensor:
        return self.table(tokens).mean(1) * torch.sigmoid(gain)[:, None] + self.bad


def exported(folder: Path, network: nn.Module) -> tuple[Path, RegisteredProgram]:
    batch, length = torch.export.Dim("batch", min=1, max=16), torch.export.Dim("seq", min=1, max=4)
    example = (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2))
    shapes = {"tokens": {0: batch, 1: length}, "gain": {0: batch}}
    content = io.BytesIO()
    torch.export.save(torch.export.export(network.eval(), example, dynamic_shapes=shapes), content)
    path = folder / "program.pt2"
    path.write_bytes(content.getvalue())
    sha256 = digest_of(path)
    program = RegisteredProgram(
        version=version_ref(sha256, name="classes", version=1),
        program=Artifact(uri="x", sha256=sha256, num_bytes=1),
        family="tensors",
        signature=SIGNATURE,
    )
    return path, program


@pytest.fixture(scope="module")
def program_of_classes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RegisteredProgram]:
    return exported(tmp_path_factory.mktemp("classes"), Classes())


def test_rows_are_made_that_the_program_takes_and_kept_with_their_answers(
    tmp_path: Path, program_of_classes: tuple[Path, RegisteredProgram]
) -> None:
    path, program = program_of_classes
    model = load_pytorch(path, SIGNATURE, Runtime())

    golden = golden_batch(program, path, tmp_path / "golden")
    again = golden_batch(program, tmp_path / "absent.pt2", tmp_path / "golden")

    assert [call["tokens"].shape for call in golden.calls] == [(1, 4), (7, 3), (16, 4)]
    assert max(call["tokens"].max() for call in golden.calls) in range(3, 40)
    for one, other in zip(golden.calls, again.calls, strict=True):
        np.testing.assert_array_equal(one["gain"], other["gain"])
    assert gap(again, model, program) == 0.0
    wrong = replace(model, score=lambda arrays: model.score(arrays) + 0.01)
    assert 0.001 < gap(golden, wrong, program) < 1
    silent = replace(model, score=lambda arrays: model.score(arrays) * np.float32(np.nan))
    with pytest.raises(ConversionError, match="may not be numbers"):
        gap(golden, silent, program)


@pytest.mark.slow
def test_rows_of_a_file_take_their_place(tmp_path: Path) -> None:
    path, program = exported(tmp_path, Classes())
    rows = tmp_path / "rows.npz"
    np.savez(rows, tokens=np.full((3, 2), 39), gain=np.ones(3, np.float32))

    golden = golden_batch(program, path, tmp_path / "golden", rows)

    assert golden.expected[0].shape == (3, 3)
    assert golden.probe["tokens"].tolist() == [[39, 39]]
    np.savez(rows, tokens=np.full((3, 2), 39))
    with pytest.raises(ConversionError, match=r"expected a NumPy archive.*tokens, gain"):
        golden_batch(program, path, tmp_path / "golden", rows)
    with pytest.raises(ArtifactError, match="cannot be read"):
        golden_batch(program, path, tmp_path / "golden", tmp_path / "none.npz")


def archive(**arrays: object) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


TOKENS, GAIN = np.full((3, 2), 39), np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (archive(tokens=TOKENS, gain=GAIN)[:-40], "expected a NumPy archive"),
        (b"root:x:0:0", "expected a NumPy archive"),
        (archive(tokens=TOKENS + 0.5, gain=GAIN), "tokens is float64 and does not fit int64"),
        (archive(tokens=TOKENS, gain=np.ones(2, np.float32)), "that the program takes"),
        (archive(tokens=TOKENS[:0], gain=GAIN[:0]), "or finds none"),
        (archive(tokens=TOKENS + 1, gain=GAIN), "that the program takes"),
        (archive(tokens=TOKENS, gain=GAIN * np.float32(np.nan)), "answers no number to some"),
    ],
    ids=["cut off", "no archive", "fractions", "uneven", "no rows", "unknown token", "no number"],
)
def test_rows_on_which_nothing_can_be_compared_are_refused(
    tmp_path: Path, program_of_classes: tuple[Path, RegisteredProgram], content: bytes, said: str
) -> None:
    path, program = program_of_classes
    rows = tmp_path / "rows.npz"
    rows.write_bytes(content)
    with pytest.raises(ArtifactError, match=said):
        answer_golden_rows(program, path, rows)


@pytest.mark.slow
def test_a_program_that_gives_no_numbers_has_no_golden_batch(tmp_path: Path) -> None:
    path, program = exported(tmp_path, Classes(bad=float("nan")))

    with pytest.raises(ConversionError, match="name a file with rows"):
        golden_batch(program, path, tmp_path / "golden")
