"""A use case's clock: what its scheduled runs work on."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flows.config import PipelineConfig, read_pipeline_config
from flows.stages import days_or_newest, hours_or_newest, moment_of_run, roll
from tasks.contracts.clock import ClockConfig
from tasks.kernel.errors import WindowError
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
ZONES = st.sampled_from(["UTC", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"])


@pytest.fixture(scope="module")
def config() -> PipelineConfig:
    return read_pipeline_config(PROJECT_ROOT / DEFAULT_FEATURE_REPO)


def test_a_replay_shows_todays_date_in_the_year_of_the_data() -> None:
    clock = ClockConfig(replay_year=2013)
    assert clock.shows(datetime(2026, 11, 21, 15, tzinfo=UTC)) == datetime(
        2013, 11, 21, 15, tzinfo=UTC
    )
    assert clock.shows(datetime(2028, 2, 29, 1, tzinfo=UTC)) == datetime(2013, 2, 28, 1, tzinfo=UTC)


def test_the_moment_of_a_run_keeps_its_zone_whatever_is_added(config: PipelineConfig) -> None:
    """Prefect's moments did not, and every scheduled refresh failed where windows are compared."""
    assert type(moment_of_run()) is datetime
    for window in (hours_or_newest(None, config), days_or_newest(None, config)):
        later = window.end + timedelta(hours=3)
        assert later.tzinfo is UTC
        assert later > window.end


def test_days_begin_at_midnight_of_the_use_case_and_wait_for_their_labels() -> None:
    clock = ClockConfig(time_zone="America/New_York", label_hours=24, drift_days=7)
    # 03:00Z is still the evening before in New York; a day later every label is known.
    window = clock.newest_days(datetime(2026, 3, 12, 3, tzinfo=UTC))
    assert window.end == datetime(2026, 3, 10, 4, tzinfo=UTC)
    assert window.start == datetime(2026, 3, 3, 5, tzinfo=UTC)  # summer time began on March 8


@given(moment=MOMENTS, zone=ZONES, hours=st.floats(0, 100), days=st.integers(1, 400))
def test_no_window_reaches_beyond_what_is_known(
    moment: datetime, zone: str, hours: float, days: int
) -> None:
    clock = ClockConfig(time_zone=zone, label_hours=hours, drift_days=days)
    window = clock.newest_days(moment)
    assert window.end <= moment - timedelta(hours=hours)
    assert moment - timedelta(hours=hours) - window.end < timedelta(hours=26)
    assert abs((window.end - window.start) - timedelta(days=days)) <= timedelta(hours=1)
    assert clock.newest_hours(moment).end <= moment


def test_a_rolled_training_grows_and_is_judged_on_the_newest_days(config: PipelineConfig) -> None:
    moment = datetime(2026, 11, 21, 15, tzinfo=UTC)
    rolled = roll(config, moment)
    assert rolled.window.start == config.window.start
    assert rolled.splits.train.start == config.splits.train.start
    assert rolled.splits.train.end == rolled.splits.validation.start
    assert rolled.splits.validation.end == rolled.splits.test.start
    assert rolled.splits.test.end == rolled.window.end == datetime(2013, 11, 20, 5, tzinfo=UTC)
    assert rolled.current == config.clock.newest_days(moment)
    assert PipelineConfig.model_validate(rolled.model_dump()) == rolled
    same = {"window", "splits", "current"}
    assert rolled.model_dump(exclude=same) == config.model_dump(exclude=same)


def test_too_few_days_to_train_on_are_refused_in_words(config: PipelineConfig) -> None:
    with pytest.raises(WindowError, match=r"fewer than 28 days to train on.* Nothing was run"):
        roll(config, datetime(2026, 3, 1, tzinfo=UTC))


def test_a_check_by_volume_looks_at_as_many_days_up_to_the_newest_hour_with_labels() -> None:
    clock = ClockConfig(label_hours=24, drift_days=7)
    window = clock.newest_labelled(datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC))
    assert window.end == datetime(2026, 5, 3, 3, tzinfo=UTC)
    assert window.start == datetime(2026, 4, 26, 3, tzinfo=UTC)


def test_rows_are_counted_in_a_table_that_has_times(config: PipelineConfig) -> None:
    told = config.model_dump()
    told["drift"]["volume"] = {"table": "flights", "rows": 2000}
    assert PipelineConfig.model_validate(told).drift.volume
    for wrong in ("planes", "no-such-table"):  # planes have no history
        told["drift"]["volume"]["table"] = wrong
        with pytest.raises(ValidationError, match="expected one of flights, weather"):
            PipelineConfig.model_validate(told)
