"""The second use case from the command line: a regression, on real rows of some weeks."""

from pathlib import Path

import pandas as pd
import pytest
from sklearn.metrics import mean_absolute_error, r2_score

import falaj
from tasks.contracts.evaluation import RegressionMetrics
from tasks.contracts.run import RunRecord
from tasks.kernel.settings import ArtifactStore
from tests.support.data.use_cases import small_traffic
from tests.support.host.processes import processes_of, run_falaj

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_traffic(tmp_path_factory.mktemp("second"))


@pytest.fixture(scope="module")
def home(repository: Path) -> Path:
    home = repository.parent / "home"
    code, said = run_falaj("--home", str(home), "--repo", str(repository), "run")
    assert code == 0, said
    assert "R²" in said
    # Reports of its own: the state folder's are the default's.
    reports = home / "use_cases" / "traffic" / "reports"
    page = (reports / "latest" / "report.html").read_text()
    assert "R² on the test window" in page
    assert "AUC" not in page
    assert processes_of(home) == []
    return home


@pytest.fixture
def record(repository: Path, home: Path) -> RunRecord:
    return falaj.open(repository, home).latest_run().record


@pytest.mark.slow
def test_reported_metrics_of_a_regression_can_be_recomputed(home: Path, record: RunRecord) -> None:
    assert record.promotion.promoted
    assert record.version.name == "traffic-volume"
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
    assert overall.skill.value == pytest.approx(1 - errors[0] / errors[1], abs=1e-6)


@pytest.mark.slow
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
