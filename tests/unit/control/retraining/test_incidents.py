"""Results answered once and in order, on a real SQLite database."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.decision import Action
from tasks.control.retraining.incidents import LOST, Here, answer, note_ends, start_claimed
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import ClaimState, Order, Outcome, RunEnd, StartedAction
from tasks.kernel.errors import DataContractError, TransientError
from tasks.metadata import database as database_module
from tests.support.control import builders
from tests.support.control.controller import Controller, Runs
from tests.support.suite.promises import Promise, proves


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "operation" / "operation.db"


@pytest.fixture
def controller(database: Path) -> Controller:
    return Controller(f"sqlite:///{database}")


def test_an_incident_has_one_run_however_long_it_lasts_and_a_promotion_ends_it(
    controller: Controller,
) -> None:
    assert controller.see(builders.stale(0)) == [Outcome.ACTS]
    controller.end_runs()
    for number in range(1, 5):
        assert controller.see(builders.stale(number)) == [Outcome.SAME_INCIDENT]
    controller.champion = 2
    assert controller.see(builders.stale(5)) == [Outcome.SUPERSEDED]  # of the former champion
    assert len(controller.runs.by_key) == 1
    assert controller.see(builders.stale(6, version=2)) == [Outcome.ACTS]
    assert len(controller.runs.by_key) == 2


def test_days_that_have_grown_are_learnt_from_again_once_the_whole_window_is_new(
    database: Path,
) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    policy = builders.FREE.model_copy(update={"retrain_at_growth": 1.5})
    days = {"now": 0}
    controller = Controller(
        f"sqlite:///{database}", policy, lambda: start + timedelta(days=days["now"])
    )

    def see(day: int) -> list[Outcome]:
        days["now"] = day
        update = {"train_days": 100.0 + day, "train_growth": (100 + day) / 100}
        made = controller.see(builders.stable(day).model_copy(update=update))
        controller.end_runs()
        return made

    assert see(49) == [Outcome.NOTHING_TO_DO]
    assert see(50) == [Outcome.ACTS]  # of 150 days, and its candidate was refused
    assert see(56) == [Outcome.SAME_INCIDENT]
    assert see(57) == [Outcome.ACTS]
    assert len(controller.runs.by_key) == 2


def test_a_late_window_is_refused_and_a_year_played_again_is_not(controller: Controller) -> None:
    controller.see(builders.stable(60))
    assert controller.see(builders.stale(50)) == [Outcome.OUTDATED]
    assert controller.see(builders.stale(10)) == [Outcome.ACTS]


def test_a_broken_feed_alerts_and_never_trains(controller: Controller) -> None:
    assert controller.see(builders.faulty(0)) == [Outcome.ALERTS]
    assert controller.see(builders.faulty(1)) == [Outcome.ALERTS]
    assert controller.sweep() == []
    assert controller.runs.by_key == {}
    assert len({alert.incident_id for alert in controller.ledger.decisions()} - {None}) == 1
    assert controller.see(builders.stale(2)) == [Outcome.ACTS]


def test_an_answer_orders_what_is_claimed_of_its_own_model_alone(controller: Controller) -> None:
    seen, here = builders.stale(0), controller.here()
    others = controller.ledger.store_result("another", "other", seen, builders.FREE).result_id
    (other,) = answer(controller.ledger, others, "a test", here).orders
    (order,) = answer(controller.ledger, controller.judge(seen), "a test", here).orders
    assert (other.model, order.model) == ("another", builders.MODEL)


def test_a_duplicate_gets_the_answer_that_was_given(controller: Controller) -> None:
    result_id = controller.judge(builders.stale(0))
    assert controller.judge(builders.stale(0)) == result_id
    assert [controller.ask(result_id) for _ in range(4)] == [[Outcome.ACTS]] * 4
    assert controller.runs.num_calls == 1
    assert len(controller.ledger.decisions()) == 1


def test_trouble_that_had_to_wait_is_acted_on_once_it_may(database: Path) -> None:
    controller = Controller(f"sqlite:///{database}", RetrainingPolicy(cool_down_hours=6))
    controller.see(builders.stale(0))
    controller.end_runs()
    controller.see(builders.stable(1))
    assert controller.see(builders.shifted(2)) == [Outcome.COOL_DOWN]
    assert controller.sweep() == []  # the same refusal adds no row
    set_back_claims(database, hours=7)
    assert controller.sweep() == [Outcome.ACTS]
    assert len(controller.runs.by_key) == 2
    assert controller.latest() == (Action.RECALIBRATE, Action.RECALIBRATE)


def test_a_recalibration_that_did_not_help_is_followed_by_a_retraining(
    controller: Controller,
) -> None:
    assert controller.see(builders.shifted(0)) == [Outcome.ACTS]
    assert controller.latest() == (Action.RECALIBRATE, Action.RECALIBRATE)
    assert controller.see(builders.shifted(1)) == [Outcome.SAME_INCIDENT]  # it is running
    controller.end_runs()
    assert controller.see(builders.shifted(2)) == [Outcome.ACTS]
    assert controller.latest() == (Action.RECALIBRATE, Action.RETRAIN)
    assert "has ended, and version 1 is the champion still" in controller.reason()
    controller.end_runs()
    assert controller.see(builders.shifted(3)) == [Outcome.SAME_INCIDENT]
    assert len(controller.runs.by_key) == 2


def test_a_retraining_that_brought_no_champion_is_followed_by_another_when_newer_rows_are_there(
    controller: Controller,
) -> None:
    now = datetime(2013, 8, 1, tzinfo=UTC)
    controller.ledger = Ledger(str(controller.ledger.engine.url), lambda: now)
    assert controller.see(builders.stale(0)) == [Outcome.ACTS]
    now += timedelta(days=15)
    assert controller.see(builders.stale(1)) == [Outcome.SAME_INCIDENT]  # it is running
    controller.end_runs()
    assert controller.see(builders.stale(2)) == [Outcome.ACTS]
    controller.end_runs()
    now += timedelta(days=13)
    assert controller.see(builders.stale(3)) == [Outcome.SAME_INCIDENT]
    now += timedelta(days=1)
    assert controller.see(builders.stale(4)) == [Outcome.ACTS]
    assert len(controller.runs.by_key) == 3


def test_nothing_is_trained_while_a_person_is_asked_about_a_new_version(
    controller: Controller,
) -> None:
    controller.see(builders.shifted(0))
    controller.end_runs()
    controller.asked_about = 2  # by the recalibration: it may have helped
    assert controller.see(builders.shifted(1)) == [Outcome.SAME_INCIDENT]
    assert controller.see(builders.stale(2)) == [Outcome.APPROVAL]
    assert "version 2 waits for a person's approval" in controller.reason()
    assert controller.sweep() == []
    assert len(controller.runs.by_key) == 1


@pytest.mark.parametrize(("champion", "made"), [(1, [Outcome.ACTS]), (2, [])])
def test_trouble_that_waited_for_a_person_goes_on_after_a_refusal_and_ends_with_an_approval(
    controller: Controller, champion: int, made: list[Outcome]
) -> None:
    controller.asked_about = 2
    assert controller.see(builders.stale(0)) == [Outcome.APPROVAL]
    controller.asked_about, controller.champion = None, champion
    assert controller.sweep() == made


def test_a_retraining_that_replaces_a_recalibration_waits_as_every_retraining_does(
    database: Path,
) -> None:
    controller = Controller(f"sqlite:///{database}", RetrainingPolicy(cool_down_hours=0))
    for number in range(3):
        controller.see(builders.stale(2 * number))
        controller.end_runs()
        controller.see(builders.stable(2 * number + 1))
    assert controller.see(builders.shifted(7)) == [Outcome.ACTS]  # its budget is another one
    controller.end_runs()
    assert controller.see(builders.shifted(8)) == [Outcome.BUDGET]
    assert "3 retrainings in the last seven days" in controller.reason()
    set_back_claims(database, hours=24 * 30)
    assert controller.sweep() == [Outcome.ACTS]
    assert controller.latest() == (Action.RECALIBRATE, Action.RETRAIN)


@proves(Promise.CLOCK_JUMP, "the cool-down lasts as long as it should")
def test_a_clock_that_was_years_ahead_holds_a_cool_down_no_longer_than_it_lasts(
    database: Path,
) -> None:
    controller = Controller(f"sqlite:///{database}", RetrainingPolicy(cool_down_hours=6))
    controller.see(builders.stale(0))
    controller.end_runs()
    set_back_claims(database, hours=-24 * 365 * 50)
    controller.see(builders.stable(1))
    assert controller.see(builders.stale(2)) == [Outcome.COOL_DOWN]
    set_back_claims(database, hours=7)
    assert controller.sweep() == [Outcome.ACTS]


@pytest.mark.parametrize("hours", [10, -24 * 365 * 10])
def test_within_one_boot_a_cool_down_lasts_as_long_as_it_should_whatever_the_clock_says(
    database: Path, hours: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = database_module.database_now
    controller = Controller(f"sqlite:///{database}", RetrainingPolicy(cool_down_hours=6))
    controller.see(builders.stale(0))
    controller.end_runs()
    controller.see(builders.stable(1))
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "database_now", lambda c: real(c) + timedelta(hours=hours))
        assert controller.see(builders.stale(2)) == [Outcome.COOL_DOWN]
    assert controller.sweep() == []  # the clock is right again
    change(database, "UPDATE falaj_claims SET uptime_s = uptime_s - 7 * 3600")
    assert controller.sweep() == [Outcome.ACTS]


def test_deciding_only_changes_nothing_but_the_record(controller: Controller) -> None:
    result_id = controller.judge(builders.stale(0))
    assert controller.ask(result_id, "decide_only") == [Outcome.DECIDE_ONLY]
    assert controller.sweep() == []
    assert controller.runs.by_key == {}
    assert controller.see(builders.stale(1)) == [Outcome.ACTS]


def test_a_start_that_fails_is_kept_and_tried_again(controller: Controller) -> None:
    class Away(Runs):
        def start(self, order: Order) -> StartedAction:
            raise TransientError("the API is away")

    here, controller.runs = controller.runs, Away()
    with pytest.raises(TransientError, match="away"):
        controller.see(builders.stale(0))
    assert len(controller.ledger.claims(ClaimState.CLAIMED)) == 1
    controller.runs = here
    controller.sweep()
    assert len(here.by_key) == 1


def two_platforms(database: Path) -> tuple[Controller, Controller]:
    """Two platforms on one database: neither knows the other's runs."""
    north, south = (Controller(f"sqlite:///{database}") for _ in range(2))
    north.runs, south.runs = (Runs(g.ledger, name) for g, name in ((north, "n"), (south, "s")))
    return north, south


def test_what_one_platform_is_about_to_start_no_other_starts(
    database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    north, south = two_platforms(database)
    answered = answer(north.ledger, north.judge(builders.stale(0)), "a test", Here(1))
    (order,) = answered.orders
    assert north.ledger.reserve(order.incident_id, "n")  # and now it takes its time
    assert south.see(builders.stale(0)) == [Outcome.ACTS]
    assert south.sweep() == []
    assert south.runs.by_key == {}
    start_claimed(north.ledger, answered.orders, north.runs.start)
    with caplog.at_level("INFO"):
        start_claimed(south.ledger, answered.orders, south.runs.start)
    assert caplog.messages == ["retrain of delays is started elsewhere"]
    assert (len(north.runs.by_key), south.runs.num_calls) == (1, 0)
    assert not south.ledger.reserve(order.incident_id, "s")


def test_what_a_platform_that_is_gone_had_reserved_another_one_starts(database: Path) -> None:
    north, south = two_platforms(database)
    (order,) = answer(north.ledger, north.judge(builders.stale(0)), "a test", Here(1)).orders
    assert north.ledger.reserve(order.incident_id, "n")
    south.sweep()
    assert south.runs.by_key == {}
    for shift in ("-16 minutes", "+32 minutes"):  # it was long ago; or the clock was set back
        change(database, f"UPDATE falaj_claims SET {moved('started_at', shift)}")
        assert south.ledger.reserve(order.incident_id, "s")
        assert not north.ledger.reserve(order.incident_id, "n")
        north, south = south, north
        north.ledger, south.ledger = south.ledger, north.ledger


def test_a_lost_run_is_taken_up_again(controller: Controller) -> None:
    controller.see(builders.stale(0))
    controller.runs.ended = RunEnd(state=LOST, seconds=None)
    assert note_ends(controller.ledger, controller.runs.end) == 0
    controller.runs.ended = None
    controller.sweep()
    assert controller.runs.num_calls == 2
    assert len(controller.runs.by_key) == 1


def test_the_record_is_listed_by_model_action_outcome_and_time(controller: Controller) -> None:
    controller.see(builders.stale(0))
    controller.end_runs()
    controller.see(builders.stable(1))
    newest, oldest = controller.ledger.decisions()
    assert (oldest.run_id, oldest.run_state, oldest.actor) == ("run-0", "completed", "a test")
    assert oldest.evidence == builders.stale(0)
    assert controller.ledger.decisions(action=Action.RETRAIN) == [oldest]
    assert controller.ledger.decisions(outcome=Outcome.NOTHING_TO_DO) == [newest]
    assert controller.ledger.decisions(model="another") == []
    assert controller.ledger.decisions(since=newest.decided_at + timedelta(hours=1)) == []


def test_what_another_release_wrote_is_read_as_far_as_it_goes(
    controller: Controller, database: Path
) -> None:
    result_id = controller.judge(builders.stale(0))
    change(
        database,
        "UPDATE falaj_verdicts SET policy = json_insert(policy, '$.later_field', 1), evidence ="
        """ replace(json_insert(evidence, '$.later_field', 1), '"result":', '"verdict":')""",
    )
    assert controller.ledger.result(result_id).evidence == builders.stale(0)
    change(database, "UPDATE falaj_verdicts SET evidence = '{}'")
    with pytest.raises(DataContractError, match="written by another release"):
        controller.ask(result_id)


def set_back_claims(database: Path, hours: float) -> None:
    """Make all claims older, as if they had been made in an earlier boot."""
    earlier = moved("claimed_at", f"{-hours} hours")
    change(database, f"UPDATE falaj_claims SET {earlier}, boot = 'the boot before'")


def moved(column: str, shift: str) -> str:
    return f"{column} = strftime('%Y-%m-%d %H:%M:%f', {column}, '{shift}')"


def change(database: Path, statement: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(statement)
