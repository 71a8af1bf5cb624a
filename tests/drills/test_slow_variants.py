"""A form that answers well and takes longer is dropped by measured time: needs a quiet machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tasks.contracts.conversion import SnapshotRows
from tasks.conversion.config import ConversionConfig
from tasks.conversion.convert import judge_variants
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.forging import changed
from tests.support.conversion.programs import SmallNetwork, built, exported, registered
from tests.support.data.builders import dataset, splits
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]
ROUNDS = 12
WIDTH = 768


def _busy(folder: Path) -> None:
    """Products of large matrices whose result is multiplied by zero and added to every score."""
    model = onnx.load(folder / MODEL_FILE)
    name = model.graph.output[0].name
    for node in model.graph.node:
        for position, made in enumerate(node.output):
            if made == name:
                node.output[position] = "inner"
    square = np.random.default_rng(0).normal(0, 0.01, (WIDTH, WIDTH)).astype(np.float32)
    for key, values in (("square", square), ("nothing", np.float32(0)), ("axis", np.array([1]))):
        model.graph.initializer.append(numpy_helper.from_array(values, f"busy_{key}"))
    nodes = [
        helper.make_node("Unsqueeze", ["inner", "busy_axis"], ["busy_column"]),
        helper.make_node("Mul", ["busy_column", "busy_square_row"], ["busy_0"]),
    ]
    row = square[:1]
    model.graph.initializer.append(numpy_helper.from_array(row, "busy_square_row"))
    for number in range(ROUNDS):
        made = f"busy_{number + 1}"
        nodes.append(helper.make_node("MatMul", [f"busy_{number}", "busy_square"], [made]))
    nodes += [
        helper.make_node("ReduceMean", [f"busy_{ROUNDS}", "busy_axis"], ["busy_mean"], keepdims=0),
        helper.make_node("Mul", ["busy_mean", "busy_nothing"], ["busy_zero"]),
        helper.make_node("Add", ["inner", "busy_zero"], [name]),
    ]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / MODEL_FILE)


@proves(Promise.CONVERSION, "a form that answers well and is slower is dropped")
def test_a_slower_int8_is_dropped_with_the_figures_of_the_race(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    rows = dataset(store)
    program = registered(store, rows, exported(SmallNetwork()))
    config = ConversionConfig(formats=("onnx-fp32", "onnx-int8"), batch_sizes=(1, 32, 1024))
    source = SnapshotRows(dataset=rows, splits=splits())
    onnx_fp32, onnx_int8 = built(program, source, config, store)
    forms = (onnx_fp32, changed(store, onnx_int8, _busy))
    good, slow = judge_variants(program, forms, source, config, store)
    assert good.accepted, good.reason
    assert not slow.accepted, slow.reason
    assert slow.reason.startswith("Dropped: at no batch size 1.05 times as fast as simpler forms")
    assert [at.batch_rows for at in slow.latencies] == [1, 32, 1024]
    assert all(
        (at.cpu_ms or 0) > (fast.cpu_ms or 0)
        for at, fast in zip(slow.latencies, good.latencies, strict=True)
    )
    assert good.throughput is not None
    assert slow.throughput is not None
    assert good.throughput.rows_per_s.low > slow.throughput.rows_per_s.high
    assert good.memory_bytes is not None
    assert slow.memory_bytes is not None
    assert slow.memory_bytes - good.memory_bytes > WIDTH * WIDTH * 2
    assert good.serves == ("one-row", "bulk", "price")
