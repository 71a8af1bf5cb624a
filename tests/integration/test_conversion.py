"""The conversion tasks under a real Prefect API: cached by content, damaged files are rebuilt."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.release import ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.task import (
    convert_to_onnx,
    convert_to_openvino,
    judge_variants,
    quantize_to_int8,
)
from tasks.settings import PROJECT_ROOT, Settings
from tests.builders import dataset, splits
from tests.promises import Promise, proves
from tests.unit.conversion.programs import SmallNetwork, exported, registered

QUICK = ConversionConfig(batch_sizes=(1, 8), timing_rounds=6, round_ms=0.5, auc_replicates=50)


@pytest.fixture(scope="module")
def prefect_api() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: str(tmp_path / "results")}):
        yield Settings.from_environment()


@flow(name="conversion-under-test")
def convert(
    program: RegisteredProgram, rows: ValidatedDataset, windows: DataSplits
) -> tuple[ModelVariant, ...]:
    onnx = convert_to_onnx(program, QUICK)
    openvino = convert_to_openvino(program, onnx, QUICK)
    int8 = quantize_to_int8(program, openvino, rows, windows, QUICK)
    return judge_variants(program, (onnx, openvino, int8), rows, windows, QUICK)


def _table(key: str) -> list[dict[str, str]]:
    with get_client(sync_client=True) as client:
        (artifact,) = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        )
    rows: list[dict[str, str]] = json.loads(str(artifact.data))
    return rows


@proves(Promise.CONVERSION, "measured once; damage is found and mended")
@pytest.mark.usefixtures("prefect_api")
def test_a_second_run_measures_nothing_again_and_a_damaged_file_is_rebuilt(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    rows = dataset(settings.store)
    program = registered(settings.store, rows, exported(SmallNetwork()))

    with caplog.at_level(logging.INFO, logger="tasks.conversion.judge"):
        first = convert(program, rows, splits())
    assert caplog.text.count("Speed as a multiple") == 3
    assert [variant.name for variant in first] == ["onnx-fp32", "openvino-fp32", "openvino-int8"]
    assert all(settings.store.holds(v.files) for v in first if v.files)
    table = _table("model-variants")
    assert [row["verdict"] for row in table] == ["kept" if v.kept else "dropped" for v in first]
    assert {"ms at batch 1 (of PyTorch's)", "reason"} <= set(table[0])

    with caplog.at_level(logging.INFO, logger="tasks.conversion.judge"):
        caplog.clear()
        assert list(convert(program, rows, splits())) == list(first)
        assert "Speed as a multiple" not in caplog.text

    assert first[0].files is not None
    model = settings.store.path(first[0].files) / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1])
    third = convert(program, rows, splits())
    assert third[0].files == first[0].files
    assert settings.store.holds(first[0].files)


def test_the_tasks_are_cheap_to_import() -> None:
    program = """if True:
        import sys, tasks.conversion.task
        heavy = {"torch", "onnx", "onnxruntime", "openvino", "nncf", "sklearn"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=PROJECT_ROOT)


def test_a_serving_process_can_load_variants_without_prefect() -> None:
    program = "import sys; sys.modules['prefect'] = None; import tasks.conversion.judge"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=PROJECT_ROOT)
