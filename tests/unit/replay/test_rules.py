"""Rules of a replay that need no history: what is recommended, chosen, permuted, answered."""

from datetime import UTC, datetime, timedelta
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.config import suites_of
from flows.replay.history import priced
from flows.replay.outcome import answered, more_acts, recommended
from flows.replay.permuted import permuted, with_days_permuted
from flows.replay.tuning import SPACE, Tried, chosen, with_field
from tasks.contracts.base import TimeWindow
from tasks.contracts.evaluation import Metric
from tasks.contracts.replay import PolicyName, PolicyQuality, ReplayedAct, Sighting
from tasks.contracts.telemetry import ResourceUse
from tasks.kernel.errors import DataContractError
from tasks.validation.runner import validate_snapshot
from tests.support.replay import worlds

START = datetime(2013, 7, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)


def quality(auc: float, trainings: int, cpu_s: float = 0.0) -> PolicyQuality:
    zero = Metric(value=0.0, low=-0.01, high=0.01)
    facts = {
        "window": TimeWindow(start=START, end=START + timedelta(days=100)),
        "quality": Metric(value=auc, low=auc - 0.01, high=auc + 0.01),
        "num_trainings": trainings, "use": {"cpu_s": cpu_s}, "gain_per_cpu_hour": None,
    }  # fmt: skip
    others = dict.fromkeys(("to_never", "to_monthly", "to_controller", "regret"), zero)
    return PolicyQuality.model_validate(facts | others)


@pytest.mark.parametrize(
    ("controller", "wins"), [(0.7495, "controller"), (0.7480, "monthly"), (0.7600, "controller")]
)
def test_the_cheapest_policy_among_those_as_good_as_the_best_is_recommended(
    controller: float, wins: PolicyName
) -> None:
    found, sentence = recommended(
        {
            "never": quality(0.71, 0),
            "monthly": quality(0.75, 6, 600),
            "controller": quality(controller, 1, 100),
            "oracle": quality(0.80, 3),
        },
        "AUC",
    )
    assert found == wins
    assert ("does not win here" in sentence) == (wins != "controller")


def seen(by: str, hours: float) -> Sighting:
    return Sighting.model_validate(
        {"at": START + hours * HOUR, "by": by, "sentence": "it is broken", "names_cause": True}
    )


def act(action: str, day: int = 0) -> ReplayedAct:
    at = START + timedelta(days=day)
    return ReplayedAct.model_validate({"at": at, "action": action, "reason": "stale"})


@pytest.mark.parametrize(("day", "is_more"), [(4, True), (19, True), (20, False), (25, False)])
def test_an_act_that_came_earlier_than_without_the_fault_is_because_of_it(
    day: int, is_more: bool
) -> None:
    done, usual = [act("wait", 1), act("retrain", day)], [act("wait", 0), act("retrain", 20)]
    assert more_acts(done, usual) == ([act("retrain", day)] if is_more else [])
    assert more_acts([*done, act("retrain", 26)], usual)[-1] == act("retrain", 26)


@pytest.mark.parametrize(
    ("sightings", "acts", "answer", "verdict"),
    [
        ([], [], "nothing", "missed"),
        ([seen("validation of rows", 1)], [], "rows refused", "right"),
        ([seen("drift check", 30)], [act("alert")], "alert", "late"),
        ([seen("monitoring", 3)], [act("retrain")], "retrain", "wrong"),
        ([], [act("retrain")], "retrain", "wrong"),
    ],
)
def test_a_fault_that_trains_a_model_is_answered_wrongly_whoever_noticed_it(
    sightings: list[Sighting], acts: list[ReplayedAct], answer: str, verdict: str
) -> None:
    assert answered(sightings, acts, START) == {"answer": answer, "verdict": verdict}


@given(days=st.integers(2, 40), seed=st.integers(0, 2**32 - 1))
def test_permuted_days_keep_their_rows_together_and_their_times_of_day(
    days: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    number = np.sort(rng.integers(0, days, 200))
    seconds = rng.integers(0, 86_400, 200)
    times = pd.Timestamp("2013-01-01", tz="UTC") + pd.to_timedelta(number * 86_400 + seconds, "s")
    frame = pd.DataFrame({"at": times, "day": number, "second": seconds, "row": range(200)})
    frame = frame.sort_values("at")
    moved = with_days_permuted(pa.Table.from_pandas(frame), "at", (seed, 0)).to_pandas()
    assert moved["at"].is_monotonic_increasing
    assert sorted(moved["row"]) == list(range(200))
    dates = moved["at"].dt.normalize()
    assert (dates.groupby(moved["day"]).nunique() == 1).all()
    assert (moved["day"].groupby(dates).nunique() == 1).all()
    assert set(dates) == set(frame["at"].dt.normalize())
    assert ((moved["at"] - dates).dt.total_seconds() == moved["second"]).all()


def test_of_configurations_as_good_as_the_best_that_with_fewest_trainings_is_chosen() -> None:
    own, better = Tried("", None, 0.750, 3), Tried("clock.test_days", 14, 0.7505, 4)
    assert chosen([own, better]) is own
    assert chosen([own, Tried("clock.test_days", 7, 0.7495, 1)]).value == 7
    assert chosen([own, Tried("clock.test_days", 7, 0.760, 9)]).value == 7


def test_every_field_that_is_tried_is_one_of_a_use_case_and_each_value_is_valid() -> None:
    config = worlds.use_case()
    for field, values in SPACE.items():
        for value in values:
            changed = with_field(config, field, value)
            assert attrgetter(field)(changed) == value
            part = field.partition(".")[0]
            type(getattr(config, part)).model_validate(getattr(changed, part).model_dump())


def test_energy_that_no_meter_read_is_estimated_and_says_so() -> None:
    found = priced(ResourceUse(cpu_s=3600))
    assert found.estimated
    assert found.joules == pytest.approx(8 * 3600)
    assert found.amount == pytest.approx(0.04)
    assert not priced(ResourceUse(cpu_s=3600, joules=10.0)).estimated


def test_a_permuted_history_has_the_same_rows_though_no_suite_would_let_it_pass(
    tmp_path: Path,
) -> None:
    plain = worlds.history(tmp_path)
    mixed = permuted(plain, (3, 0))
    suite = suites_of(plain.config, worlds.FLIGHTS).training_set
    with pytest.raises(DataContractError):
        validate_snapshot(mixed.dataset.snapshot, suite, plain.store)
    row_id = plain.columns.row_id
    assert sorted(mixed.rows[row_id]) == sorted(plain.rows[row_id])
    assert (np.diff(mixed.times) >= np.timedelta64(0)).all()
    assert mixed.dataset.snapshot.data.sha256 != plain.dataset.snapshot.data.sha256
