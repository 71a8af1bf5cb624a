"""The whole loop from the command line, on real rows of January."""

import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
import yaml
from prefect.testing.utilities import prefect_test_harness
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from flows.config import read_pipeline_config
from flows.conversion import reconversion_flow
from tasks.conversion.config import ConversionConfig
from tasks.kernel.files import digest_of
from tasks.lineage.journal import RUNS, Journal
from tasks.lineage.trace import trace
from tasks.registry.model_folder import read_version
from tests.support.host.processes import processes_of
from tests.support.platform.loops import Loop, champion_of, loop_repository
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.timeout(900)


def test_the_run_ends_with_a_report_a_champion_and_no_process(loop: Loop) -> None:
    assert "Falaj" in (loop.home / "reports" / "latest" / "report.html").read_text()
    assert loop.record.promotion.promoted
    assert all(stage.seconds > 0 for stage in loop.record.stages)
    assert processes_of(loop.home) == []


def test_reported_metrics_can_be_recomputed_from_the_stored_predictions(loop: Loop) -> None:
    evaluation = loop.record.evaluation
    rows = pd.read_parquet(loop.path(evaluation.predictions))
    label = loop.record.dataset.snapshot.columns.label
    names = [c for c in rows if c in (label, "label")]
    truth, score = rows[names[0]], rows["score"]
    assert len(rows) == evaluation.overall.num_rows
    assert evaluation.overall.auc.value == pytest.approx(roc_auc_score(truth, score), abs=1e-9)
    assert evaluation.overall.pr_auc.value == pytest.approx(
        average_precision_score(truth, score), abs=1e-9
    )
    assert evaluation.overall.brier.value == pytest.approx(brier_score_loss(truth, score), abs=1e-6)
    assert evaluation.baseline_model.auc.value == pytest.approx(
        roc_auc_score(truth, rows["yardstick_score"]), abs=1e-9
    )


def test_reported_parity_can_be_recomputed_from_the_stored_models(loop: Loop) -> None:
    record = loop.record
    columns = record.model.columns
    rows = pd.read_parquet(loop.path(record.dataset.snapshot.data)).tail(500)
    categorical, numeric = columns.model_inputs(rows)
    program = torch.export.load(loop.path(record.model.program)).module()
    with torch.inference_mode():
        expected = program(torch.from_numpy(categorical), torch.from_numpy(numeric)).numpy()
    variant = next(v for v in record.variants if v.name == "onnx-fp32")
    file = next(loop.path(variant.files).glob("*.onnx"))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"categorical": categorical, "numeric": numeric})
    assert np.abs(found - expected).max() <= max(2 * variant.parity_max, 1e-6)


@proves(Promise.TRACED, "each digest is that of its file")
def test_every_digest_in_the_report_is_that_of_the_artifact(loop: Loop) -> None:
    record = loop.record
    for artifact in (
        record.model.program,
        record.model.checkpoint,
        record.model.log,
        record.dataset.snapshot.data,
        record.dataset.validation.result,
        record.evaluation.predictions,
    ):
        assert loop.store.holds(artifact)
    assert record.version.program_sha256 == record.model.program.sha256
    assert record.evaluation.model_sha256 == record.model.program.sha256
    assert record.version.snapshot_sha256 == record.dataset.snapshot.data.sha256


def test_no_row_vanishes_between_the_raw_file_and_the_training_set(loop: Loop) -> None:
    snapshot = loop.record.dataset.snapshot
    flights = loop.repository.read("flights")
    # A prediction is made two hours before departure: all of these moments lie in the window.
    counted = snapshot.num_rows + sum(e.num_rows for e in snapshot.excluded)
    assert counted == len(flights)


@proves(Promise.TRACED, "prediction to raw files, by digests alone")
def test_a_prediction_is_traced_back_to_the_raw_files_by_digests(loop: Loop) -> None:
    record = loop.record
    landed = record.refresh.rows.landed.tables
    for digest in (
        record.evaluation.predictions.sha256,
        record.version.program_sha256,
        *(v.files.sha256 for v in record.variants if v.files),
    ):
        chain = trace(digest[:12], Journal(loop.home / "lineage"))
        assert chain.start.version == digest
        assert {source.version for source in chain.sources()} == {
            digest_of(loop.repository.path / "raw" / f"{table.name}.csv") for table in landed
        }
        assert record.dataset.snapshot.data.sha256 in {o.data.version for o in chain}
    said = loop.succeed("trace", record.version.program_sha256[:12])
    assert "by train.flight-delay" in said
    assert "raw/flights.csv" in said


def test_the_catalogue_names_the_champion_as_the_user_of_each_view(loop: Loop) -> None:
    said = loop.run("--json", "catalogue", "--dry-run")[1]
    (entry,) = json.loads(said[said.index("{") :])["use_cases"]
    (model,) = entry["models"]
    assert (model["model"], model["champion"]) == ("flight-delay", loop.record.version.version)
    for view in entry["views"]:
        assert view["consumers"] == [model]
        assert view["quality"]["expectations"] >= view["quality"]["held"] > 0
        assert view["newest_event"] < view["online_until"] < view["published"]
        assert view["sources"]


def test_a_second_run_reuses_every_stage_without_what_trains_and_draws(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    builds = loop.store.num_builds
    first = loop.record
    steps = (loop.home / "lineage" / RUNS).read_text()
    said = loop.succeed("run")
    assert "leaked" not in said  # by a library, when the process ended
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines()}
    assert {"torch", "matplotlib", "sklearn"} & imported == set() < {"mlflow", "feast"} & imported
    again = Loop(loop.home, loop.repository).record
    assert loop.store.num_builds == builds
    assert (loop.home / "lineage" / RUNS).read_text() == steps
    assert [stage.stage for stage in again.stages if not stage.reused] == ["promotion"]
    assert again.version == first.version
    assert again.evaluation == first.evaluation
    assert again.variants == first.variants
    assert again.run_id != first.run_id


@proves(Promise.INTERRUPT, "the rerun resumes and completes")
def test_a_run_killed_in_training_leaves_no_process_and_goes_on_from_its_checkpoint(
    loop: Loop, tmp_path: Path
) -> None:
    """The state of the finished run is kept up to training; only the model is new."""
    described = loop.repository.path / "use_case.yaml"
    original = described.read_text()
    changed = yaml.safe_load(original)
    changed["training"] = {"max_epochs": 12, "patience": 12, "hidden_sizes": [24], "num_bins": 8}
    described.write_text(yaml.safe_dump(changed))
    try:
        with loop.start("train") as killed:
            for line in killed.stdout:
                if "epoch 1:" in line:
                    killed.send_signal(signal.SIGKILL)
                    break
        deadline = time.monotonic() + 10
        while processes_of(loop.home):
            assert time.monotonic() < deadline, processes_of(loop.home)
            time.sleep(0.1)
        said = loop.succeed("train")
        assert "resumed after epoch" in said, said
        assert "is the candidate" in said
    finally:
        described.write_text(original)


@proves(Promise.SENTENCE, "exit code 2 and a sentence; no file was made")
def test_a_wrong_window_is_refused_before_anything_is_touched(tmp_path: Path, loop: Loop) -> None:
    words = ("features", "refresh", "2013-01-05T05:00Z", "2013-01-03T05:00Z")
    code, said = Loop(tmp_path / "home", loop.repository).run(*words)
    assert code == 2
    assert "is reversed" in said
    assert "Traceback" not in said
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
@proves(Promise.BAD_DATE, "exit code 2 and a sentence; nothing published")
def test_bad_raw_rows_are_refused_in_a_sentence_and_nothing_is_published(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "home", loop_repository(tmp_path))
    flights = loop.repository.read("flights")
    local = pd.to_datetime(flights["time_hour"]) - pd.Timedelta(hours=5)
    flights["time_hour"] = local.dt.strftime("%Y-%m-%dT%H:%M:%SZ")
    loop.repository.write("flights", flights)
    code, said = loop.run("features", "refresh", "2013-01-03T05:00Z", "2013-01-06T05:00Z")
    assert code == 2, said
    assert "raw_flights" in said
    assert "Traceback" not in said
    assert not (loop.home / "feature_tables").exists()
    assert not (loop.home / "feast").exists()


@pytest.mark.slow
def test_the_champion_is_converted_again_into_other_forms(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    shutil.copytree(loop.home, home, symlinks=True)
    monkeypatch.setenv("FALAJ_HOME", str(home))
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(loop.repository.path))
    config = read_pipeline_config(loop.repository.path)
    quick = {"formats": ["onnx-fp32", "openvino-int8"], "measurement": "quick"}
    again = config.model_copy(update={"conversion": ConversionConfig.model_validate(quick)})
    champion = champion_of(home, config.registry.model_name)
    snapshots = sorted((home / "artifacts" / "snapshots").iterdir())

    with prefect_test_harness(server_startup_timeout=120):
        variants = reconversion_flow(None, again)

    assert [variant.name for variant in variants] == quick["formats"]
    assert {variant.source_sha256 for variant in variants} == {champion.ref.program_sha256}
    filed = read_version(champion_of(home, config.registry.model_name)).variants
    assert tuple(entry.variant for entry in filed.variants) == variants
    assert sorted((home / "artifacts" / "snapshots").iterdir()) == snapshots
