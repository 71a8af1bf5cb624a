"""Model repositories for Triton: what is written, and what is found before a server would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.contracts.base import Artifact
from tasks.contracts.conversion import PreparedRows
from tasks.contracts.release import ModelVariant
from tasks.conversion.config import ConversionConfig, TritonConfig
from tasks.conversion.triton.model import _schema, as_text, check_schema
from tasks.conversion.triton.repository import most_rows, with_repository, write_repository
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import build_one, kept
from tests.support.data import encoders

VERSION = 3


def serving(case: Case, **settings: object) -> ConversionConfig:
    return case.config.model_copy(update={"triton": TritonConfig.model_validate(settings)})


def test_a_repository_holds_the_form_its_version_and_a_row_to_warm_it_up(case: Case) -> None:
    form = kept(case.onnx, case.program, "gpu")
    told = write_repository(case.program, form, case.rows, serving(case), case.store)
    folder = case.store.path(told.files)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    names = {"config.pbtxt", "3/model.onnx", "warmup/categorical", "warmup/numeric"}
    assert found == {f"late-arrival/{name}" for name in names}
    assert (told.model, told.models) == ("late-arrival", ("late-arrival",))
    assert case.onnx.files is not None
    source = case.store.path(case.onnx.files) / "model.onnx"
    assert (folder / "late-arrival/3/model.onnx").read_bytes() == source.read_bytes()
    assert len((folder / "late-arrival/warmup/numeric").read_bytes()) == 5 * 4
    text = (folder / "late-arrival/config.pbtxt").read_text()
    for line in ('backend: "onnxruntime"', "kind: KIND_GPU", "dims: [1]\n  reshape {", "rows_32"):
        assert line in text


def test_a_form_that_says_it_is_of_another_snapshot_gets_no_repository(case: Case) -> None:
    form = kept(case.onnx, case.program)
    other = form.model_copy(update={"provenance": {**form.provenance, "snapshot_sha256": "f" * 64}})
    with pytest.raises(ArtifactError, match="belong to another model, snapshot or build"):
        write_repository(case.program, other, case.rows, serving(case, instances=4), case.store)


def test_the_same_repository_is_not_written_twice(case: Case) -> None:
    form, config = kept(case.onnx, case.program), serving(case, instances=2)
    first = write_repository(case.program, form, case.rows, config, case.store)
    builds = case.store.num_builds
    assert write_repository(case.program, form, case.rows, config, case.store) == first
    assert case.store.num_builds == builds


def test_every_setting_is_one_that_tritons_schema_knows(case: Case) -> None:
    form = kept(case.onnx, case.program)
    config = serving(case, max_wait_us=100, timeout_ms=20, instances=3)
    told = write_repository(case.program, form, case.rows, config, case.store)
    assert told.schema_of.startswith("tritonclient ")
    text = (case.store.path(told.files) / "late-arrival/config.pbtxt").read_text()
    from google.protobuf import text_format

    message = _schema()[0]()  # type: ignore[index]
    text_format.Parse(text, message)
    assert message.dynamic_batching.max_queue_delay_microseconds == 100
    policy = message.dynamic_batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (256, 20_000)
    assert [(group.count, group.kind) for group in message.instance_group] == [(3, 2)]
    assert [list(tensor.dims) for tensor in message.input] == [[3], [5]]
    assert [sample.batch_size for sample in message.model_warmup] == [1, 32]


@pytest.mark.parametrize(
    "text", ['nmae: "a"', "input { data_type: TYPE_FP33 }", "max_batch_size: x"]
)
def test_what_tritons_schema_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(ConversionError, match="the configuration of odd is not one of Triton's"):
        check_schema(text, "odd")


def test_text_is_written_so_that_it_reads_back_as_it_was() -> None:
    text = as_text({"name": 'a "b"\n\\ c', "many": [1, -1], "of": [{"a": 1}, {"a": 2}]})
    expected = [
        'name: "a \\"b\\"\\n\\\\ c"',
        "many: [1, -1]",
        "of {",
        "  a: 1",
        "}",
        "of {",
        "  a: 2",
        "}",
    ]
    assert text.splitlines() == expected


def test_a_form_that_cannot_be_served_so_stays_and_says_why(case: Case) -> None:
    form = kept(case.onnx, case.program, "gpu-h200")
    config = serving(case, onnx_backend="python")
    same = with_repository(case.program, form, case.rows, config, case.store)
    assert same.triton is None
    assert (
        "no model repository: ONNX in Triton's Python backend runs on proc"
        in same.settings["triton"]
    )
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


@pytest.mark.slow
def test_rows_without_a_tokenizer_are_served_as_token_ids(
    tmp_path: Path, quick: ConversionConfig
) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    program, rows = encoders.registered(store, "encoder"), encoders.prepared(store)
    config = quick.model_copy(update={"triton": TritonConfig()})
    onnx = build_one("onnx-fp32", program, rows, config, store)
    plain = write_repository(program, kept(onnx, program), rows, config, store)
    assert plain.models == ("encoder",)
    text = (store.path(plain.files) / "encoder/config.pbtxt").read_text()
    assert "TYPE_INT64\n  dims: [-1]" in text
    with_tokenizer = rows.model_copy(update={"tokenizer": _tokenizer(store, tmp_path)})
    whole = write_repository(program, kept(onnx, program), with_tokenizer, config, store)
    assert whole.models == ("encoder-tokenizer", "encoder-model", "encoder")


def _tokenizer(store: ArtifactStore, tmp_path: Path) -> Artifact:
    source = tmp_path / "encoder" / "tokenizer.json"

    def build(folder):  # type: ignore[no-untyped-def]
        (folder.path / source.name).write_bytes(source.read_bytes())
        data = folder.artifact(source.name)
        return PreparedRows(data=data, num_calibration=1, num_judged=1, made_from={})

    return store.build_once("tokenizers", "one", PreparedRows, build).data
