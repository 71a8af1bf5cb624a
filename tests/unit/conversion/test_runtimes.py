from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.contracts.conversion import tabular_signature
from tasks.conversion.convert import judge_variants
from tasks.conversion.kinds.tabular import tabular_inputs
from tasks.conversion.provenance import LIMITS, computes_bf16, weight_bits
from tasks.conversion.targets.interface import LoadedModel, ModelInputs, Runtime, load_files, loaded
from tasks.conversion.variants import load_variant
from tasks.kernel.errors import ConversionError, DataContractError
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import build_one, built, with_formats
from tests.support.data.builders import COLUMNS
from tests.support.suite.promises import Promise, proves


@pytest.fixture(params=["pytorch", "onnx", "openvino"])
def model(request: pytest.FixtureRequest, case: Case) -> LoadedModel:
    if request.param == "pytorch":
        return case.load_source()
    return case.load(case.onnx if request.param == "onnx" else case.openvino)


def test_a_setting_that_did_not_take_is_an_error() -> None:
    settings = {"runtime": "openvino 2026", "precision": "bf16"}
    signature = tabular_signature(COLUMNS)
    with pytest.raises(ConversionError, match="runs with precision 'bf16', expected 'f32'"):
        loaded(0.0, lambda _: np.zeros(1, np.float32), signature, settings, {"precision": "f32"})


def test_other_layouts_and_number_types_give_the_same_scores(
    model: LoadedModel, typical: ModelInputs
) -> None:
    expected = model(typical)
    assert expected.dtype == np.float32
    assert expected.shape == (typical.num_rows,)
    codes, numbers = typical["categorical"], typical["numeric"]
    layouts = [
        (codes.astype(np.int64), numbers.astype(np.float64)),
        (np.asfortranarray(codes), np.asfortranarray(numbers)),
        (np.repeat(codes, 2, axis=0)[::2], np.repeat(numbers, 2, 0)[::2]),
    ]
    for categorical, numeric in layouts:
        np.testing.assert_array_equal(model(tabular_inputs(categorical, numeric)), expected)


@pytest.mark.parametrize(
    ("codes", "numbers"), [((4, 5), (4, 3)), ((4, 3), (3, 5)), ((4, 3), (4, 6)), ((4,), (4, 5))]
)
def test_arrays_of_another_shape_are_refused_with_a_sentence(
    model: LoadedModel, codes: tuple[int, ...], numbers: tuple[int, ...]
) -> None:
    with pytest.raises(DataContractError, match=r"expected .* were they swapped\?"):
        model({"categorical": np.zeros(codes, np.int32), "numeric": np.zeros(numbers)})


def test_a_provider_that_is_not_there_is_an_error_and_no_silent_fall_back(case: Case) -> None:
    folder, gpu = case.store.path(case.onnx.files), Runtime(hardware_class="gpu")
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(ConversionError, match="provider 'CPUExecutionProvider', expected 'CUDA"),
    ):
        load_files("onnx-fp32", folder, case.program.signature, gpu)


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("onnx-fp32", "model.onnx", "ONNX Runtime cannot load the model"),
        ("openvino-fp32", "model.xml", "OpenVINO cannot load the model"),
    ],
)
@pytest.mark.parametrize("content", [None, b"not a model"])
def test_files_that_are_no_model_are_refused_with_a_sentence(
    tmp_path: Path, name: str, file: str, message: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ConversionError, match=message):
        load_files(name, tmp_path, tabular_signature(COLUMNS), Runtime())


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")


@without_gpu
def test_an_engine_that_cannot_be_built_spoils_no_other_form_and_is_tried_anew(case: Case) -> None:
    job = with_formats(case, "onnx-fp32", "tensorrt-fp16")
    forms = built(job, case.onnx)
    assert [form.name for form in forms] == ["onnx-fp32", "onnx-fp16", "tensorrt-fp16"]
    assert [form.failure is None for form in forms] == [True, True, False]
    builds = case.store.num_builds
    built(job, *forms[:2])
    assert case.store.num_builds == builds  # what a machine lacks is not remembered as a result
    onnx, engine = judge_variants(job, forms)
    assert onnx.latencies
    assert not engine.accepted
    assert "Dropped: not built" in engine.reason
    assert "Convert on the `gpu` work pool" in engine.reason


Host = Callable[..., None]
NO_LIMIT = ""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Passes for a host whose processor has these flags, within a limit."""

    def become(flags: str, limit: str = NO_LIMIT, name: str = LIMITS[0]) -> None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu avx2 {flags}\n\n")
        monkeypatch.setattr("tasks.conversion.provenance.CPU_INFO", tmp_path / "cpuinfo")
        for each in LIMITS:
            monkeypatch.delenv(each, raising=False)
        monkeypatch.setenv(name, limit)

    return become


@pytest.mark.parametrize(
    ("flags", "limit", "has_bf16", "saturates_int8"),
    [
        ("", NO_LIMIT, False, True),
        ("avx512_vnni", NO_LIMIT, False, False),
        ("avx_vnni avx_ne_convert", NO_LIMIT, True, False),
        ("avx512_vnni avx512_bf16", NO_LIMIT, True, False),
        ("avx_vnni avx512_vnni avx512_bf16 amx_int8", "avx2", False, True),
        ("avx_vnni avx512_vnni avx512_bf16 amx_int8", "AVX512_CORE_VNNI", False, False),
        ("avx_vnni avx512_vnni avx512_bf16 amx_int8", "AVX512_CORE_BF16", True, False),
        ("avx512_vnni", "AVX2_VNNI", False, True),
        ("avx_vnni avx_ne_convert", "AVX2_VNNI_2", True, False),
    ],
)
def test_flags_and_a_limit_decide(
    host: Host, flags: str, limit: str, has_bf16: bool, saturates_int8: bool
) -> None:
    host(flags, limit)
    assert (computes_bf16(), weight_bits()) == (has_bf16, 7 if saturates_int8 else 8)


@proves(Promise.NO_FALLBACK, "what the processor cannot compute is dropped with that reason")
def test_bfloat16_is_dropped_with_the_reason_where_the_processor_lacks_it(
    host: Host, case: Case
) -> None:
    host("avx512_vnni")
    one = build_one("openvino-bf16", case, case.onnx)
    (variant,) = judge_variants(with_formats(case, "openvino-bf16"), (one,))
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
        made[flags] = build_one(name, case, case.onnx, case.openvino)
    exact, limited = made.values()
    assert (exact.settings["weight_bits"], limited.settings["weight_bits"]) == ("8", "7")
    assert exact.files != limited.files
    load_variant(limited, case.program, Runtime(), case.store)
    with pytest.raises(ConversionError, match="convert the model again on such a processor"):
        load_variant(exact, case.program, Runtime(), case.store)
    host("avx512_vnni")
    for one in made.values():
        load_variant(one, case.program, Runtime(), case.store)
