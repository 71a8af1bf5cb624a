"""The forms for graphics processors, on one: they run there and nowhere else, and agree."""

import importlib.util
import json
from pathlib import Path

import onnxruntime as ort
import pytest
import torch

from tasks.contracts.release import BuiltVariant
from tasks.conversion.convert import judge_variants
from tasks.conversion.examine import score_batches, score_gap
from tasks.conversion.kinds.interface import bound_of, kind_of
from tasks.conversion.targets.interface import LoadedModel, ModelInputs, Runtime, load_files
from tasks.conversion.targets.onnx import GPU_PROVIDER
from tasks.conversion.targets.tensorrt import ENGINE_ROWS, FACTS_FILE
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.cases import Converted, edges, typical
from tests.support.conversion.programs import (
    QUICK,
    SmallNetwork,
    build_one,
    built,
    tabular_job,
    with_formats,
)

__all__ = ["edges", "typical"]  # fixtures
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no CUDA device"),
]
GPU = Runtime(hardware_class="gpu")
FORMS = ("onnx-fp32", "onnx-fp16", "onnx-int8")
ENGINES = ("tensorrt-fp16", "tensorrt-int8")
HAS_TENSORRT = importlib.util.find_spec("tensorrt") is not None
needs_tensorrt = pytest.mark.skipif(not HAS_TENSORRT, reason="TensorRT is not installed here")


def needs_provider(provider: str) -> None:
    if provider not in ort.get_available_providers():
        pytest.skip(f"the ONNX Runtime here was built without {provider}: onnxruntime-gpu has it")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """One small program, of which a machine for GPUs makes the forms: OpenVINO is not needed."""
    store = ArtifactStore(tmp_path_factory.mktemp("conversion") / "artifacts")
    return Converted(**vars(tabular_job(store, SmallNetwork())))


def agrees(case: Converted, model: LoadedModel, precision: str, *batches: ModelInputs) -> None:
    family = kind_of(case.program)
    judged = family.read_judged(case)
    expected = score_batches(case.load_source(), batches)
    gap = score_gap(expected, score_batches(model, batches), judged.distances)
    bound = bound_of(family, precision, case.config)
    assert gap.largest <= bound.max_gap
    assert gap.mean <= bound.mean_gap


@pytest.mark.parametrize("name", FORMS)
def test_an_onnx_variant_runs_on_the_device(
    case: Converted, typical: ModelInputs, name: str
) -> None:
    needs_provider(GPU_PROVIDER)
    one = build_one(name, case)
    model = load_files(name, case.store.path(one.files), case.program.signature, GPU)
    assert model.settings["provider"] == GPU_PROVIDER  # read back from the session
    agrees(case, model, one.precision, typical)


@pytest.fixture(scope="module")
def engines(case: Converted) -> dict[str, BuiltVariant]:
    return {form.name: form for form in built(with_formats(case, *ENGINES))}


@needs_tensorrt
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_built_loaded_and_agrees_in_calls_of_any_size(
    case: Converted,
    engines: dict[str, BuiltVariant],
    typical: ModelInputs,
    edges: ModelInputs,
    name: str,
) -> None:
    form = engines[name]
    assert form.files is not None, form.failure
    model = load_files(name, case.store.path(form.files), case.program.signature, GPU)
    assert model.settings["provider"] == "TensorRT"
    assert model.settings["device"] == torch.cuda.get_device_name()
    agrees(case, model, form.precision, typical, edges, typical.block(0, 1), typical.block(0, 7))
    assert typical.num_rows > ENGINE_ROWS  # so it was cut into several calls
    assert model(typical.block(0, 0)).shape == (0,)


@needs_tensorrt
def test_an_engine_of_another_version_or_device_is_refused(
    case: Converted, engines: dict[str, BuiltVariant], tmp_path: Path
) -> None:
    form = engines["tensorrt-fp16"]
    assert form.files is not None, form.failure
    folder = case.store.path(form.files)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    facts = json.loads((tmp_path / FACTS_FILE).read_text())
    (tmp_path / FACTS_FILE).write_text(json.dumps(facts | {"compute_capability": "1.0"}))
    with pytest.raises(ConversionError, match=r"was built for compute_capability 1\.0, here"):
        load_files(form.name, tmp_path, case.program.signature, GPU)


def test_the_judge_times_forms_on_the_device(tmp_path: Path) -> None:
    needs_provider(GPU_PROVIDER)
    store = ArtifactStore(tmp_path / "artifacts")
    targets = FORMS + (ENGINES if HAS_TENSORRT else ())
    config = QUICK.model_copy(update={"formats": targets, "hardware_class": "gpu"})
    job = tabular_job(store, SmallNetwork(), config)
    variants = judge_variants(job, built(job))
    assert all(variant.latencies for variant in variants), [v.reason for v in variants]
    assert {v.settings["provider"] for v in variants} <= {GPU_PROVIDER, "TensorRT"}
