"""What a processor can compute decides what is built for it, and what is dropped with a reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.conversion.convert import judge_variants
from tasks.conversion.loading import load_variant
from tasks.conversion.processor import LIMITS, Processor, this_processor
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.openvino import without_reporting
from tasks.kernel.errors import ConversionError
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import build_one
from tests.support.suite.promises import Promise, proves

Host = Callable[..., None]
NO_LIMIT = ""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Passes for a host whose processor has these flags, within a limit."""

    def become(flags: str, limit: str = NO_LIMIT, name: str = LIMITS[0]) -> None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu avx2 {flags}\n\n")
        monkeypatch.setattr("tasks.conversion.processor.CPU_INFO", tmp_path / "cpuinfo")
        for each in LIMITS:
            monkeypatch.delenv(each, raising=False)
        monkeypatch.setenv(name, limit)

    return become


@pytest.mark.parametrize(
    ("flags", "limit", "computes_bf16", "saturates_int8"),
    [
        ("", NO_LIMIT, False, True),
        ("avx512f avx512bw", NO_LIMIT, False, True),
        ("avx512_vnni", NO_LIMIT, False, False),
        ("avx_vnni", NO_LIMIT, False, False),
        ("avx_vnni avx_ne_convert", NO_LIMIT, True, False),
        ("avx512_vnni avx512_bf16", NO_LIMIT, True, False),
        ("avx_vnni avx512_vnni avx512_bf16 amx_int8", "SSE41", False, True),
        ("avx_vnni avx512_vnni avx512_bf16 amx_int8", "avx2", False, True),
        ("avx_vnni avx512_vnni avx512_bf16 amx_int8", "AVX512_CORE", False, True),
        ("avx_vnni avx512_vnni avx512_bf16 amx_int8", "AVX512_CORE_VNNI", False, False),
        ("avx_vnni avx512_vnni avx512_bf16 amx_int8", "AVX512_CORE_BF16", True, False),
        ("avx_vnni avx512_vnni avx512_bf16 amx_int8", "ALL", True, False),
        ("avx512_vnni", "AVX2_VNNI", False, True),
        ("avx_vnni avx_ne_convert", "AVX2_VNNI", False, False),
        ("avx_vnni avx_ne_convert", "AVX2_VNNI_2", True, False),
    ],
)
def test_flags_and_a_limit_decide(
    host: Host, flags: str, limit: str, computes_bf16: bool, saturates_int8: bool
) -> None:
    host(flags, limit)
    assert this_processor() == Processor(computes_bf16, saturates_int8)
    assert this_processor().weight_bits == (7 if saturates_int8 else 8)


def test_the_older_name_of_the_limit_counts_too(host: Host) -> None:
    host("avx512_vnni", "AVX2", name=LIMITS[1])
    assert this_processor().saturates_int8


def test_a_processor_that_is_no_x86_does_not_saturate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n")
    monkeypatch.setattr("tasks.conversion.processor.CPU_INFO", tmp_path / "cpuinfo")
    assert this_processor() == Processor(computes_bf16=False, saturates_int8=False)


def test_openvino_says_the_same_of_bfloat16_on_this_host() -> None:
    able = without_reporting("openvino").Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert this_processor().computes_bf16 == ("BF16" in able)


@pytest.mark.skipif(any(name in os.environ for name in LIMITS), reason="limited")
def test_onnx_runtime_saturates_on_this_host_where_that_is_said_and_never_with_7_bits() -> None:
    for weight, is_right in ((127, not this_processor().saturates_int8), (64, True)):
        got = _product(np.full((1, 64), 255, np.uint8), np.full((64, 16), weight, np.int8))
        assert (got == 64 * 255 * weight).all() == is_right


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["left", "right"], ["sum"])],
        "product",
        [helper.make_tensor_value_info("left", TensorProto.UINT8, left.shape)],
        [helper.make_tensor_value_info("sum", TensorProto.INT32, (len(left), right.shape[1]))],
        [numpy_helper.from_array(right, "right")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"left": left})[0]
    return result


@proves(Promise.NO_FALLBACK, "what the processor cannot compute is dropped with that reason")
def test_bfloat16_is_dropped_with_the_reason_where_the_processor_lacks_it(
    host: Host, case: Case
) -> None:
    host("avx512_vnni")
    config = case.config.model_copy(update={"formats": ("openvino-bf16",)})
    one = build_one("openvino-bf16", case.program, case.rows, config, case.store, case.onnx)
    (variant,) = judge_variants(case.program, (one,), case.rows, config, case.store)
    assert not variant.accepted
    assert variant.reason.startswith("Dropped: not built: this processor computes no bfloat16")


@proves(Promise.NO_FALLBACK, "8-bit weights run on no processor that saturates")
@pytest.mark.parametrize("name", ["onnx-int8", "openvino-int8"])
def test_a_form_for_one_class_of_processors_is_not_taken_for_that_of_another(
    host: Host, case: Case, name: str
) -> None:
    made = {}
    for flags in ("avx512_vnni", ""):
        host(flags)
        made[flags] = build_one(
            name, case.program, case.rows, case.config, case.store, case.onnx, case.openvino
        )
    exact, limited = made.values()
    assert (exact.settings["weight_bits"], limited.settings["weight_bits"]) == ("8", "7")
    assert exact.files != limited.files
    load_variant(limited, case.program, Runtime(), case.store)
    with pytest.raises(ConversionError, match="convert the model again on such a processor"):
        load_variant(exact, case.program, Runtime(), case.store)
    host("avx512_vnni")
    for one in made.values():
        load_variant(one, case.program, Runtime(), case.store)
