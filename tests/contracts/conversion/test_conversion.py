"""The conversion tasks under a real Prefect API: cached by content, damaged files are rebuilt."""

import json
import logging
from collections.abc import Iterator

import pytest
from prefect import flow

from tasks.contracts.conversion import SnapshotRows
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.release import ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.task import build_variants, judge_variants
from tasks.kernel.settings import Settings
from tests.support.conversion.programs import SmallNetwork, exported, registered
from tests.support.data.builders import dataset, splits
from tests.support.services.prefect_platform import shown
from tests.support.suite.promises import Promise, proves

CONFIG = ConversionConfig(batch_sizes=(1, 8))


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the judge logs. Not `caplog`: the first flow of a process takes its handler away."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tasks.conversion.convert")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@flow(name="conversion-under-test")
def convert(
    program: RegisteredProgram, rows: ValidatedDataset, windows: DataSplits
) -> tuple[ModelVariant, ...]:
    source = SnapshotRows(dataset=rows, splits=windows)
    return judge_variants(program, build_variants(program, source, CONFIG), source, CONFIG)


@proves(Promise.CONVERSION, "measured once; damage is found and mended")
@pytest.mark.usefixtures("on_prefect")
def test_a_second_run_measures_nothing_again_and_a_damaged_file_is_rebuilt(
    settings: Settings, told: list[str]
) -> None:
    rows = dataset(settings.store)
    program = registered(settings.store, rows, exported(SmallNetwork()))

    first = convert(program, rows, splits())
    assert sum("Speed as a multiple" in line for line in told) == 3
    assert [variant.name for variant in first] == ["onnx-fp32", "openvino-fp32", "openvino-int8"]
    assert all(settings.store.holds(v.files) for v in first if v.files)
    table = json.loads(str(shown("model-variants")[-1].data))
    assert [row["decision"] for row in table] == [
        "accepted" if v.accepted else "dropped" for v in first
    ]
    assert {"ms at batch 1 (of PyTorch's)", "serves"} <= set(table[0])

    told.clear()
    assert list(convert(program, rows, splits())) == list(first)
    assert told == []

    model = settings.store.path(first[0].files) / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1])
    assert convert(program, rows, splits())[0].files == first[0].files
    assert settings.store.holds(first[0].files)
