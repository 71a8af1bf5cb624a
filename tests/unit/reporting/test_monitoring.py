"""Features over time on the page: every view and feature, its alerts, and no name as a tag."""

from datetime import timedelta

from tasks.contracts.data import FeatureMonitoring, MonitoredFeature, MonitoredPeriod, MonitoredView
from tasks.kernel.settings import ArtifactStore
from tests.support.data.builders import YEAR, edited, month
from tests.support.reporting.pages import rendered
from tests.support.reporting.run_records import run_record


def monitoring(views: int = 6, features: int = 12) -> FeatureMonitoring:
    weeks = tuple(
        MonitoredPeriod(
            start=YEAR.start + timedelta(days=7 * n), low=7.0 - n / 10, median=10.0,
            high=15.0 + n / 7, null_rate=0.1 if n % 9 else 0.4, num_rows=1000 + n,
        )
        for n in range(52)
    )  # fmt: skip
    return FeatureMonitoring(
        window=YEAR,
        baseline=month(1, 3),
        tables_version="5" * 32,
        num_statistics=25_541,
        views=tuple(
            MonitoredView(
                view=f"view_{n}", num_rows=133_314, num_features=16, age_hours=1.0,
                lag_minutes=5.0, null_rate=0.11, highest_psi=0.92, psi_bound=2.03, num_alerts=n,
            )
            for n in range(views)
        ),
        features=tuple(
            MonitoredFeature(
                view=f"view_{n % 6}", feature=f"late_rate_24h_{n}", psi=2.5 / (n + 1), ks=0.4,
                drifted=n == 0, periods=weeks,
            )
            for n in range(features)
        ),
        alerts=("late_rate_24h of view_0 drifted: PSI 2.38 above 2.03",),
        num_new_alerts=1,
    )  # fmt: skip


def test_the_page_shows_views_values_and_alerts(store: ArtifactStore) -> None:
    text, page = rendered(edited(run_record(store), "refresh.monitoring", monitoring()), store)

    assert 'id="features"' in text
    assert 'href="#features"' in text
    for words in ("view_5", "late_rate_24h_11", "PSI 2.38 above 2.03", "25,541 statistics"):
        assert words in page.words


def test_a_run_without_monitoring_or_with_an_empty_one_can_be_shown(store: ArtifactStore) -> None:
    assert "#features" not in rendered(run_record(store), store)[0]
    _, page = rendered(
        edited(run_record(store), "refresh.monitoring", monitoring(views=0, features=0)), store
    )
    assert "No view has a history." in page.words
