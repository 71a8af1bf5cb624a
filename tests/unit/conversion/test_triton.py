"""Model repositories for Triton: what is written, and what is found before a server would."""

import importlib.util
from dataclasses import replace
from importlib.metadata import distribution
from typing import Any

import pytest
from google.protobuf import text_format

from tasks.contracts.release import ModelVariant
from tasks.conversion.config import TritonConfig
from tasks.conversion.targets.interface import ConversionJob
from tasks.conversion.triton.repository import most_rows, with_repository, write_repository
from tasks.kernel.errors import ArtifactError
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import kept


def serving(case: Case, **settings: object) -> ConversionJob:
    triton = TritonConfig.model_validate(settings)
    return replace(case, config=case.config.model_copy(update={"triton": triton}))


def parsed(text: str) -> Any:
    """A configuration, as Triton's own schema reads it. Its package wants an older protobuf."""
    file = distribution("tritonclient").locate_file("tritonclient/grpc/model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("triton_model_config", str(file))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return text_format.Parse(text, module.ModelConfig())


def test_a_repository_holds_the_form_its_version_and_a_row_to_warm_it_up(case: Case) -> None:
    form = kept(case.onnx, case.program, "gpu")
    job = serving(case, max_wait_us=100, timeout_ms=20)
    told = write_repository(job, form)
    assert write_repository(job, form) == told
    folder = case.store.path(told.files)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    names = {"config.pbtxt", "3/model.onnx", "warmup/categorical", "warmup/numeric"}
    assert found == {f"late-arrival/{name}" for name in names}
    source = case.store.path(case.onnx.files) / "model.onnx"
    assert (folder / "late-arrival/3/model.onnx").read_bytes() == source.read_bytes()
    assert len((folder / "late-arrival/warmup/numeric").read_bytes()) == 5 * 4
    message = parsed((folder / "late-arrival/config.pbtxt").read_text())
    assert (message.name, message.backend) == ("late-arrival", "onnxruntime")
    assert message.dynamic_batching.max_queue_delay_microseconds == 100
    policy = message.dynamic_batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (256, 20_000)
    assert [(group.count, group.kind) for group in message.instance_group] == [(1, 1)]
    assert [list(tensor.dims) for tensor in message.input] == [[3], [5]]
    assert [(list(t.dims), t.HasField("reshape")) for t in message.output] == [([1], True)]
    assert [sample.batch_size for sample in message.model_warmup] == [1, 32]
    assert list(message.version_policy.specific.versions) == [case.program.version.version]
    assert message.parameters["falaj.variant"].string_value == "onnx-fp32"


def test_a_form_that_says_it_is_of_another_snapshot_gets_no_repository(case: Case) -> None:
    form = kept(case.onnx, case.program)
    other = form.model_copy(update={"provenance": {**form.provenance, "snapshot_sha256": "f" * 64}})
    with pytest.raises(ArtifactError, match="belong to another model, snapshot or build"):
        write_repository(serving(case, timeout_ms=4), other)


def test_a_form_that_cannot_be_served_so_stays_and_says_why(case: Case) -> None:
    form = kept(case.onnx, case.program, "gpu-h200")
    same = with_repository(serving(case, onnx_backend="python"), form)
    assert same.triton is None
    assert "runs on processors alone" in same.settings["triton"]
    assert same.accepted


@pytest.mark.parametrize(
    ("asked", "engine", "most"), [(64, None, 64), (65_536, "512", 512), (100, "512", 100)]
)
def test_no_execution_has_more_rows_than_the_engine_takes(
    case: Case, asked: int, engine: str | None, most: int
) -> None:
    settings = {} if engine is None else {"engine_rows": engine}
    form: ModelVariant = kept(case.onnx, case.program).model_copy(update={"settings": settings})
    assert most_rows(case.program, form, TritonConfig(max_batch_rows=asked)) == most
