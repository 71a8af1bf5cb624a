"""The second use case from the command line: a regression, on real rows of some weeks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from sklearn.metrics import mean_absolute_error, r2_score

from flows.config import read_pipeline_config
from tasks.contracts.evaluation import RegressionMetrics
from tasks.contracts.run import RunRecord
from tasks.settings import PROJECT_ROOT, ArtifactStore
from tests.integration.test_embedded import processes_of

pytestmark = pytest.mark.timeout(900)

REPOSITORY = PROJECT_ROOT / "feature_repo" / "traffic"
WEEKS = {
    "window": {"start": "2016-10-01T05:00:00Z", "end": "2017-03-01T06:00:00Z"},
    "splits": {
        "train": {"start": "2016-11-06T06:00:00Z", "end": "2017-01-08T06:00:00Z"},
        "validation": {"start": "2017-01-08T06:00:00Z", "end": "2017-01-29T06:00:00Z"},
        "test": {"start": "2017-01-29T06:00:00Z", "end": "2017-02-27T06:00:00Z"},
    },
    "current": {"start": "2017-01-29T06:00:00Z", "end": "2017-02-27T06:00:00Z"},
    "monitoring": {"baseline": {"start": "2016-11-06T06:00:00Z", "end": "2017-01-08T06:00:00Z"}},
    "training": {"max_epochs": 12, "global_batch_size": 128, "hidden_sizes": [32], "num_bins": 8},
    "yardstick": {"max_iterations": 30, "min_leaf_rows": 20},
    "evaluation": {"slices": ["weekday"], "min_slice_rows": 80, "min_days": 3, "replicates": 100},
    "conversion": {"targets": ["onnx-fp32"], "timing_rounds": 6, "round_ms": 2},
    "promotion": {
        **{"min_r2": 0.5, "yardstick_margin": 0.3, "min_skill": -5, "max_bias": 0.5},
        **{"max_slice_error_ratio": 5, "required_hardware": []},
    },
}


def command(home: Path, repository: Path) -> tuple[int, str]:
    words = ["--home", str(home), "--repo", str(repository), "run"]
    done = subprocess.run(
        [sys.executable, "-m", "flows", *words],
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    return done.returncode, done.stdout


def reports(home: Path) -> Path:
    """The use case's own reports: the state folder's are the default's."""
    return home / "use_cases" / "traffic" / "reports"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The use case as it is, with windows of some weeks and gates as wide as they need."""
    folder = tmp_path_factory.mktemp("traffic") / "traffic"
    shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    described: dict[str, Any] = yaml.safe_load((folder / "use_case.yaml").read_text())
    (folder / "use_case.yaml").write_text(yaml.safe_dump({**described, **WEEKS}))
    return folder


@pytest.fixture(scope="module")
def home(repository: Path) -> Path:
    home = repository.parent / "home"
    code, said = command(home, repository)
    assert code == 0, said
    assert "R²" in said
    return home


@pytest.fixture
def record(home: Path) -> RunRecord:
    facts = json.loads((reports(home) / "latest" / "report.json").read_text())
    return RunRecord.model_validate({k: facts[k] for k in RunRecord.model_fields if k in facts})


def test_the_use_case_of_the_repository_is_valid_and_apart_from_the_default() -> None:
    config = read_pipeline_config(REPOSITORY)
    default = read_pipeline_config(PROJECT_ROOT / "feature_repo" / "flights")
    assert config.features.training_set.task == "regression"
    assert config.registry.model_name != default.registry.model_name
    assert config.registry.experiment != default.registry.experiment


def test_a_regression_runs_the_whole_loop_and_leaves_no_process(
    home: Path, record: RunRecord
) -> None:
    assert record.promotion.promoted
    assert record.version.name == "traffic-volume"
    assert record.dataset.snapshot.label_summary is not None
    assert processes_of(home) == []


def test_reported_metrics_of_a_regression_can_be_recomputed(home: Path, record: RunRecord) -> None:
    overall = record.evaluation.overall
    assert isinstance(overall, RegressionMetrics)
    rows = pd.read_parquet(ArtifactStore(home / "artifacts").path(record.evaluation.predictions))
    assert overall.r2.value == pytest.approx(r2_score(rows["volume"], rows["score"]), abs=1e-6)
    assert overall.mae.value == pytest.approx(
        mean_absolute_error(rows["volume"], rows["score"]), rel=1e-6
    )
    last_week = rows["slot_history__volume_last"]
    known = last_week.notna()
    errors = [((one - rows["volume"])[known] ** 2).mean() for one in (rows["score"], last_week)]
    assert overall.skill is not None
    assert overall.skill.value == pytest.approx(1 - errors[0] / errors[1], abs=1e-6)


def test_no_feature_knows_the_hour_that_is_predicted(home: Path, record: RunRecord) -> None:
    """The last count of the same hour of the week is that of a week before, or older.

    Older where that one was not counted; an hour more in the week after clocks changed.
    """
    store = ArtifactStore(home / "artifacts")
    rows = pd.read_parquet(store.path(record.dataset.snapshot.data))
    rows = rows.set_index(pd.to_datetime(rows["event_timestamp"], utc=True))
    week = rows["volume"].shift(freq="168h").reindex(rows.index)
    seen = rows["slot_history__volume_last"]
    both = week.notna() & seen.notna()
    assert both.sum() > 2000
    assert (week[both] == seen[both]).mean() > 0.9
    now = rows["volume"].shift(freq="26h").reindex(rows.index)  # counted and published by then
    latest = rows["recent_flow__volume_1h"]
    both = now.notna() & latest.notna()
    assert (now[both] == latest[both]).mean() > 0.9


def test_the_report_speaks_of_the_regression(home: Path) -> None:
    page = (reports(home) / "latest" / "report.html").read_text()
    for words in ("R² on the test window", "Predicted against observed", "Mean absolute error by"):
        assert words in page
    assert "AUC" not in page


def test_a_second_run_reuses_what_is_finished(home: Path, repository: Path) -> None:
    code, said = command(home, repository)
    assert code == 0, said
    stages = json.loads((reports(home) / "latest" / "report.json").read_text())["stages"]
    ran = {stage["stage"] for stage in stages if not stage["reused"]}
    assert ran == {"promotion"}, said
