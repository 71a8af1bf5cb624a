"""What the checks of the daily system say of a history that was broken on purpose."""

from datetime import datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest

from flows.config import PipelineConfig, read_pipeline_config
from flows.replay.faults import cut_rows, false_alarms, faulty_world, sightings, undisturbed_world
from tasks.contracts.base import TimeWindow
from tasks.contracts.replay import Sighting
from tasks.features.injection import parse_faults
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore, Settings
from tests.support.data.use_cases import small_traffic
from tests.support.replay.landed import HISTORY, after, landed

UseCase = tuple[PipelineConfig, Settings]
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> UseCase:
    """Five months of the second use case, whose history was never refreshed."""
    folder = tmp_path_factory.mktemp("faults")
    return use_case(small_traffic(folder), folder)


def use_case(repo: Path, folder: Path) -> UseCase:
    config = read_pipeline_config(repo)
    clock = config.clock.model_copy(update={"replay_year": None})
    config = config.model_copy(update={"clock": clock})
    return config, Settings(home=folder / "home", feature_repo=repo)


def start_of(text: str, of: UseCase) -> datetime:
    return parse_faults(text, of[0].window, of[0].clock.time_zone)[0].start


def seen(text: str, of: UseCase, days: int = 3) -> dict[str, Sighting]:
    """The sightings of one fault, by what noticed it."""
    config, settings = of
    (fault,) = parse_faults(text, config.window, config.clock.time_zone)
    found = sightings(faulty_world(fault, config, settings), config, settings, days)
    assert [s.at for s in found] == sorted(s.at for s in found)
    assert all(s.at > fault.start for s in found)
    return {sighting.by: sighting for sighting in found}


def test_another_unit_is_noticed_and_named_by_the_next_refresh(traffic: UseCase) -> None:
    found = seen("celsius@2017-02-02", traffic, days=1)
    rows = found["validation of rows"]
    assert rows.names_cause
    assert rows.at - start_of("celsius@2017-02-02", traffic) < timedelta(hours=2)
    assert set(found) == {"validation of rows"}, "refused rows are no features"


def test_a_clock_that_is_off_is_noticed_in_the_first_night(traffic: UseCase) -> None:
    rows = seen("timezone@2017-02-02", traffic, days=1)["validation of rows"]
    assert rows.at - start_of("timezone@2017-02-02", traffic) < timedelta(hours=7)


def test_a_frozen_feed_is_noticed_on_its_first_day(traffic: UseCase) -> None:
    found = seen("freeze@2017-02-02:36h", traffic, days=1)
    assert min(s.at for s in found.values()) < start_of("freeze@2017-02-02", traffic) + DAY


def test_a_feed_that_stops_is_noticed_although_no_row_of_it_is_wrong(traffic: UseCase) -> None:
    found = seen("station-missing@2017-02-02:4d", traffic, days=3)
    assert found["monitoring"].at - start_of("station-missing@2017-02-02", traffic) < DAY
    assert found["validation of rows"].names_cause


def test_labels_turned_around_leave_every_feature_and_are_noticed_by_no_check_of_them(
    traffic: UseCase,
) -> None:
    config, settings = traffic
    assert seen("labels-flipped@2017-02-02:0.02", traffic) == {}
    (fault,) = parse_faults("labels-flipped@2017-02-02:0.02", config.window)
    world, whole = faulty_world(fault, config, settings), undisturbed_world(config, settings)
    assert world.dataset is not None
    assert whole.dataset is not None
    new, old = (
        pd.read_parquet(settings.store.path(d.snapshot.data))
        for d in (world.dataset, whole.dataset)
    )
    pd.testing.assert_frame_equal(new.drop(columns="volume"), old.drop(columns="volume"))
    assert world.dataset.validation.warnings  # nothing vouches for it, and it says so
    assert not whole.dataset.validation.warnings


def test_the_undisturbed_weeks_raise_nothing_that_they_should_not(traffic: UseCase) -> None:
    config, settings = traffic
    window = TimeWindow(
        start=config.splits.validation.start, end=config.splits.validation.start + 6 * DAY
    )
    alarms = false_alarms(config, settings, window, [])
    assert (alarms.num_days, alarms.refused, alarms.data_faults) == (6, 0, 0)


def test_a_cut_holds_the_rows_of_its_window_and_of_the_baseline_before_its_end(
    tmp_path: Path,
) -> None:
    store = ArtifactStore(tmp_path)
    tables, times = landed(store).tables, {"readings": "at"}
    window = TimeWindow(start=after(240), end=after(288))
    baseline = TimeWindow(start=HISTORY.start, end=after(300))
    for base, hours in ((None, 48), (baseline, 288)):
        cut = {t.name: t for t in cut_rows(tables, times, window, base, store)}
        at = pd.read_parquet(store.path(cut["readings"].artifact))["at"]
        assert len(at) == cut["readings"].num_rows == 3 * hours
        assert at.max() < window.end
        assert cut["sales"] == next(t for t in tables if t.name == "sales")


@pytest.mark.slow
def test_weather_in_celsius_is_noticed_in_the_flights_year_within_hours(tmp_path: Path) -> None:
    flights = use_case(PROJECT_ROOT / "feature_repo" / "flights", tmp_path)
    assert seen("celsius@07-10", flights, days=3)["validation of rows"].names_cause
