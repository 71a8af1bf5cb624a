"""TensorRT engines where there is no TensorRT: what is promised; that others are not spoiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.contracts.conversion import Signature, TensorSpec
from tasks.conversion.convert import judge_variants
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.registry import load_files
from tasks.conversion.targets.tensorrt import FACTS_FILE, equipment
from tasks.conversion.targets.tensorrt_engine import ShapeRange, shape_ranges
from tasks.kernel.errors import ConversionError
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import built

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
TEXTS = Signature(
    inputs=(TensorSpec(name="ids", dtype="int64", shape=("batch", "seq")),),
    output=TensorSpec(name="unit", dtype="float32", shape=("batch", 8)),
    largest={"batch": 512, "seq": 24},
)


def test_ranges_go_from_one_to_what_program_and_engine_take(case: Case) -> None:
    table = shape_ranges(case.program.signature, typical_rows=32, most_rows=1024)
    assert table["numeric"] == ShapeRange((1, 5), (32, 5), (1024, 5))
    assert shape_ranges(TEXTS, 600, 1024) == {"ids": ShapeRange((1, 1), (512, 24), (512, 24))}


def test_an_axis_without_a_largest_length_is_refused() -> None:
    endless = TEXTS.model_copy(update={"largest": {"batch": 512}})
    with pytest.raises(ConversionError, match="nothing says how long the axes seq may be"):
        shape_ranges(endless, 32, 1024)


@without_gpu
def test_without_a_device_or_tensorrt_a_sentence_says_where_to_convert() -> None:
    with pytest.raises(ConversionError, match="Convert on the `gpu` work pool"):
        equipment()


@without_gpu
def test_an_engine_that_cannot_be_built_spoils_no_other_form_and_is_tried_anew(case: Case) -> None:
    config = case.config.model_copy(update={"formats": ("onnx-fp32", "tensorrt-fp16")})
    forms = built(case.program, case.rows, config, case.store, given=(case.onnx,))
    assert [form.name for form in forms] == ["onnx-fp32", "onnx-fp16", "tensorrt-fp16"]
    assert [form.failure is None for form in forms] == [True, True, False]
    builds = case.store.num_builds
    built(case.program, case.rows, config, case.store, given=forms[:2])
    assert case.store.num_builds == builds  # what a machine lacks is not remembered as a result
    onnx, engine = judge_variants(case.program, forms, case.rows, config, case.store)
    assert onnx.latencies
    assert not engine.accepted
    assert engine.reason.startswith("Dropped: not built: ")


def test_an_engine_is_not_loaded_on_a_processor(tmp_path: Path) -> None:
    (tmp_path / FACTS_FILE).write_text(json.dumps({}))
    with pytest.raises(ConversionError, match="an engine runs on graphics processors"):
        load_files("tensorrt-fp16", tmp_path, TEXTS, Runtime())
