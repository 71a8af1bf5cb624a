from __future__ import annotations

from pathlib import Path

import pytest

from falaj.__main__ import EXIT_WRONG_INPUT, main
from falaj.loop import import_lines
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import GoalResult
from tasks.contracts.release import ImportedModel
from tasks.kernel.settings import ArtifactStore
from tests.support.registry.builders import variants


def test_the_last_lines_say_what_became_of_variants_and_what_serves_which_goal(
    tmp_path: Path,
) -> None:
    standing = GoalResult(
        goal="bulk", rule="Most rows.", figure=9, unit="rows/s", chosen=True, reason="9 rows/s"
    )
    lost = standing.model_copy(update={"goal": "price", "chosen": False})
    kept, dropped = variants(ArtifactStore(tmp_path), "a" * 64)
    kept = kept.model_copy(update={"standings": (standing, lost)})
    version = ModelVersionRef(
        name="digits", version=3, run_id="r", program_sha256="a" * 64, snapshot_sha256="b" * 64
    )
    assert list(import_lines(ImportedModel(version=version, variants=(kept, dropped)))) == [
        "",
        "Model     digits version 3, aaaaaaaaaaaa",
        f"onnx-fp32             {kept.reason}",
        f"openvino-int8         {dropped.reason}",
        "Goal      bulk: onnx-fp32, 9 rows/s",
    ]


def test_a_faulty_description_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, file = tmp_path / "home", tmp_path / "digits.yaml"
    monkeypatch.setenv("FALAJ_HOME", str(home))
    file.write_text("program: {file: x}")
    assert main(["--home", str(home), "import", str(file)]) == EXIT_WRONG_INPUT
    assert "digits.yaml: program.signature, registry: Field required" in capsys.readouterr().err
    assert not home.exists()


def test_a_folder_is_refused_as_a_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    assert main(["--home", str(tmp_path / "home"), "import", str(tmp_path)]) == EXIT_WRONG_INPUT
    assert f"{tmp_path.name} cannot be read" in capsys.readouterr().err
