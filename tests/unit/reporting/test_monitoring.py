"""Features over time on the page: every view and feature, its alerts, and no name as a tag."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureMonitoring, MonitoredFeature, MonitoredPeriod, MonitoredView
from tasks.contracts.run import RunRecord
from tasks.evaluation.monitoring.alerts import MOST_GROUPS, alert, grouped
from tasks.kernel.settings import ArtifactStore
from tasks.reporting.figures import Pictures
from tests.support.reporting.pages import parsed, rendered, texts, tips
from tests.support.reporting.run_records import EVIL, run_record, window

YEAR = window(1, 12)


def periods(middle: float | None) -> tuple[MonitoredPeriod, ...]:
    return tuple(
        MonitoredPeriod(
            start=YEAR.start + timedelta(days=7 * n),
            low=None if middle is None else middle - 3 - n / 10,
            median=middle,
            high=None if middle is None else middle + 5 + n / 7,
            null_rate=0.1 if n % 9 else 0.4,
            num_rows=1000 + n,
        )
        for n in range(52)
    )


def monitoring(
    name: str = "late_rate_24h", views: int = 6, features: int = 12
) -> FeatureMonitoring:
    return FeatureMonitoring(
        window=YEAR,
        baseline=window(1, 3),
        tables_version="5" * 32,
        num_statistics=25_541,
        views=tuple(
            MonitoredView(
                view=f"view_{n}", num_rows=133_314, num_features=16, age_hours=1.0,
                lag_minutes=5.0, null_rate=0.11, highest_psi=0.92, psi_bound=2.03, num_alerts=n,
                periods=periods(None), ages_hours=tuple([1.0] * 50 + [None, 30.0]),
            )
            for n in range(views)
        ),
        features=tuple(
            MonitoredFeature(
                view=f"view_{n % 6}", feature=f"{name}_{n}", psi=2.5 / (n + 1), ks=0.4,
                drifted=n == 0, periods=periods(10.0 * n),
            )
            for n in range(features)
        ),
        alerts=(f"{name} of view_0 drifted in the 7 days to 2013-07-03: PSI 2.38 above 2.03",),
        num_new_alerts=1,
    )  # fmt: skip


def with_monitoring(record: RunRecord, seen: FeatureMonitoring | None) -> RunRecord:
    return record.model_copy(
        update={"refresh": record.refresh.model_copy(update={"monitoring": seen})}
    )


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def test_the_page_shows_views_values_and_alerts(store: ArtifactStore) -> None:
    text, page = rendered(with_monitoring(run_record(store), monitoring()), store)

    assert 'id="features"' in text
    assert 'href="#features"' in text
    for words in ("view_5", "late_rate_24h_11", "PSI 2.38 above 2.03", "25,541 statistics"):
        assert words in page.words


def test_thousands_of_alerts_lengthen_the_page_by_a_few_lines(store: ArtifactStore) -> None:
    day = timedelta(days=1)
    spans = [TimeWindow(start=YEAR.start + n * day, end=YEAR.start + (n + 1) * day)
             for n in range(360)]  # fmt: skip
    sentence = "view_0 is 46 h old at 2013-03-01 00:00Z; in the baseline it was at most 24 h"
    alerts = [
        alert("freshness", f"view_{view}", None, span, "critical", 46.0, 27.0, sentence)
        for view in range(60)
        for span in spans
    ]
    few = monitoring()
    many = few.model_copy(update={"alerts": grouped(alerts)})

    with_few, with_many = (
        rendered(with_monitoring(run_record(store), seen), store)[0] for seen in (few, many)
    )

    assert len(alerts) > 20_000
    assert with_many.count("360 times from") == MOST_GROUPS
    assert 0 < len(with_many) - len(with_few) < 6000


def test_a_run_without_monitoring_has_no_such_section(store: ArtifactStore) -> None:
    text, _ = rendered(with_monitoring(run_record(store), None), store)

    assert "#features" not in text


def test_a_monitoring_with_nothing_in_it_can_be_shown(store: ArtifactStore) -> None:
    nothing = monitoring(views=0, features=0)

    _, page = rendered(with_monitoring(run_record(store), nothing), store)

    assert "No view has a history." in page.words


def test_names_stay_names(store: ArtifactStore) -> None:
    text, _ = rendered(with_monitoring(run_record(store), monitoring(EVIL)), store)

    assert EVIL not in text


def test_each_feature_and_each_view_has_a_chart_and_what_is_not_known_draws_none(
    store: ArtifactStore,
) -> None:
    [first, *_] = monitoring().features
    empty = first.model_copy(update={"periods": periods(None), "psi": None})
    seen = monitoring().model_copy(update={"features": (first, empty)})
    record = with_monitoring(run_record(store), seen)

    assert len(tips(parsed(Pictures(record).feature_values))) == 2
    assert [words for words in texts(parsed(Pictures(record).feature_values)) if "no PSI" in words]
    assert len(tips(parsed(Pictures(record).view_health))) == 6


def test_a_record_of_a_release_without_monitoring_still_parses(store: ArtifactStore) -> None:
    text = run_record(store).refresh.model_dump_json(exclude={"monitoring"})

    assert type(run_record(store).refresh).model_validate_json(text).monitoring is None


@pytest.mark.parametrize(
    ("hours", "told"),
    [
        (0.0, "age below 1 min (dashed)"),
        (0.05, "age up to 3 min (dashed)"),
        (1.0, "age up to 60 min (dashed)"),
        (30.0, "age up to 30 h (dashed)"),
        (240.0, "age up to 10 days (dashed)"),
        (None, "age not known"),
    ],
)
def test_an_age_is_written_in_a_unit_that_leaves_a_number_to_read(
    store: ArtifactStore, hours: float | None, told: str
) -> None:
    seen = monitoring(views=1)
    [view] = seen.views
    aged = view.model_copy(update={"ages_hours": (hours,) * 52})
    record = with_monitoring(run_record(store), seen.model_copy(update={"views": (aged,)}))

    assert told in texts(parsed(Pictures(record).view_health))
