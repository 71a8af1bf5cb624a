from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from falaj import session
from falaj.__main__ import main
from falaj.features import parity_line
from flows import feature_refresh, pipeline
from flows.config import read_pipeline_config
from tasks.features.checks.equality import ParityReport, ViewParity
from tasks.kernel.errors import FeatureStoreError
from tasks.kernel.settings import PROJECT_ROOT


def report(differing: int, null: int = 0) -> ParityReport:
    view = ViewParity(
        view="weather",
        watermark=datetime(2013, 1, 5, tzinfo=UTC),
        num_entities=3,
        num_values=27,
        num_differing=differing,
        num_null=null,
        num_stale=0,
        num_overtaken=0,
    )
    return ParityReport(
        feature_service="service",
        tables_version="0" * 32,
        seed=0,
        views=(view,),
        examples=(),
        result="different" if differing else "equal",
        evidence=("feature view weather: 1 of 27 values differ",) if differing else (),
    )


@pytest.mark.parametrize(("differing", "code"), [(0, 0), (1, 1)])
def test_the_exit_code_says_whether_online_equals_offline(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    differing: int,
    code: int,
) -> None:
    config = read_pipeline_config(PROJECT_ROOT / "feature_repo" / "flights")

    def run(context: Any, work: Any) -> list[str]:
        lines: list[str] = work(config)
        return lines

    monkeypatch.setattr(feature_refresh, "parity_check_flow", lambda config: report(differing))
    monkeypatch.setattr(session, "run_flow", run)
    assert main(["features", "parity"]) == code
    said = capsys.readouterr()
    if differing:
        assert "failed: FeatureStoreError" in said.err
        assert "weather: 1 of 27 values differ" in said.err
    else:
        assert "equal online and offline at 2013-01-05 00:00Z: 27 values of 3" in said.out


def test_a_view_of_nothing_but_nulls_is_not_called_equal() -> None:
    (some,), (none,) = report(0, null=26).views, report(0, null=27).views
    assert "equal online and offline" in parity_line(some)
    assert "nothing to compare" in parity_line(none)
    assert "27 of them null on both sides; 0 entities too old" in parity_line(none)


def test_a_run_ends_with_the_comparison_and_fails_where_values_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = read_pipeline_config(PROJECT_ROOT / "feature_repo" / "flights")
    monkeypatch.setattr(pipeline, "parity_check_flow", lambda config: report(0))
    pipeline.check_online(config)
    monkeypatch.setattr(pipeline, "parity_check_flow", lambda config: report(1))
    with pytest.raises(FeatureStoreError, match="weather: 1 of 27 values differ"):
        pipeline.check_online(config)
