"""The record of releases, and the way from a decision to moved traffic, cut off at every point."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from sqlalchemy import update

from tasks.contracts.rollout import Action, Shares
from tasks.kernel.errors import DataContractError, TransientError
from tasks.metadata import tables
from tasks.metadata.database import transaction
from tasks.release.ledger import ReleaseLedger, tracks_at_start
from tasks.release.records import ByHand, Decision, Release
from tasks.release.rollout import Cycle, Releasing
from tasks.release.traffic import TracksRefusedError, set_traffic
from tests.support.release.builders import (
    CONFIG,
    MODEL,
    STEPS,
    FakeChampions,
    FakeLog,
    FakeTraffic,
    Rows,
    evidence,
    finding,
)

PROMOTE = Decision(action=Action.PROMOTE, rule="passed", reason="no harm")
BACK = Decision(action=Action.ROLL_BACK, rule="harm", reason="it is worse")
HOLD = Decision(action=Action.HOLD, rule="too_few", reason="more are needed")
IDLE = CONFIG.model_copy(
    update={
        "steps": tuple(s.model_copy(update={"min_minutes": 0, "min_requests": 0}) for s in STEPS),
        "settle_s": 0,
    }
)


@pytest.fixture
def releasing(tmp_path: Path) -> Releasing:
    ledger = ReleaseLedger(f"sqlite:///{tmp_path / 'operation' / 'operation.db'}")
    return Releasing(ledger, FakeTraffic(), FakeChampions())


def begun(releasing: Releasing) -> Release:
    return releasing.begin(MODEL, IDLE, "a test")


def decided(releasing: Releasing, decision: Decision) -> Release:
    known = releasing.ledger.open_release(MODEL)
    return releasing.ledger.decide(known, decision, "a test", evidence(finding()))


def evaluated(releasing: Releasing, release: Release) -> Cycle:
    """The next cycle, before which nothing was logged."""
    return releasing.evaluate(release, FakeLog(), datetime.now(UTC))


def test_a_release_goes_through_its_steps_to_its_end(releasing: Releasing) -> None:
    release = begun(releasing)
    assert (release.step, release.is_moved) == (0, True)
    assert releasing.traffic.shared == Shares(mirror=100)
    assert releasing.traffic.at == {"stable": "1", "candidate": "2", "shadow": "2"}
    release = releasing.settle(decided(releasing, PROMOTE))
    assert releasing.traffic.shared.candidate == 25
    assert releasing.traffic.at["shadow"] is None
    releasing.settle(decided(releasing, PROMOTE))
    release = releasing.settle(decided(releasing, PROMOTE))
    assert (release.state, release.is_moved) == ("released", True)
    assert releasing.traffic.at == {"stable": "2", "candidate": None, "shadow": None}
    assert releasing.traffic.shared == Shares()
    assert [p.step for p in release.periods] == [0, 1, 2]
    assert all(p.until is not None for p in release.periods)
    assert releasing.ledger.open_release(MODEL) is None
    said = [entry.action for entry in releasing.ledger.entries(release.release_id)]
    assert said == [Action.START, *[Action.PROMOTE] * 3]


def test_a_roll_back_takes_requests_away_first_and_the_alias_next(releasing: Releasing) -> None:
    begun(releasing)
    releasing.settle(decided(releasing, PROMOTE))
    releasing.traffic.calls.clear()
    release = releasing.settle(decided(releasing, BACK))
    assert releasing.traffic.calls == ["shares 0/0", "tracks 1/None/None"]
    champions = releasing.champions
    assert champions.now == "1"
    assert "it is worse" in champions.taken_back[0]
    assert release.state == "rolled_back"
    assert not releasing.due(MODEL, IDLE)
    champions.now = "2"  # the registry kept it: the version is not released by itself again
    assert not releasing.due(MODEL, IDLE)
    assert releasing.begin(MODEL, IDLE, "Amal").is_open


def test_an_alias_that_cannot_go_back_is_recorded_and_traffic_is_back(releasing: Releasing) -> None:
    begun(releasing)
    releasing.champions.refuses = True
    release = releasing.settle(decided(releasing, BACK))
    assert release.is_moved
    assert releasing.traffic.at["candidate"] is None
    last = releasing.ledger.entries(release.release_id)[-1]
    assert (last.rule, last.reason[:9]) == ("alias_refused", "version 1")


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("action", ["start", "step", "end", "back"])
def test_killed_at_any_move_the_next_one_finishes_it(
    releasing: Releasing, action: str, at: int
) -> None:
    if action != "start":
        begun(releasing)
    for _ in range({"end": 2, "back": 1}.get(action, 0)):
        releasing.settle(decided(releasing, PROMOTE))
    calls = releasing.traffic.calls
    releasing.traffic.killed_at = len(calls) + at
    try:
        if action == "start":
            begun(releasing)
        else:
            releasing.settle(decided(releasing, BACK if action == "back" else PROMOTE))
    except KeyboardInterrupt:
        left = releasing.ledger.last_release(MODEL)
        assert not left.is_moved
    releasing.traffic.killed_at = None
    releasing.finish(MODEL)
    release = releasing.ledger.last_release(MODEL)
    assert release.is_moved
    wanted = {
        "start": ("1", "2", Shares(mirror=100)),
        "step": ("1", "2", Shares(candidate=25)),
        "end": ("2", None, Shares()),
        "back": ("1", None, Shares()),
    }[action]
    seen = releasing.traffic
    assert (seen.at["stable"], seen.at["candidate"], seen.shared) == wanted
    actions = [e.action for e in releasing.ledger.entries(release.release_id)]
    assert actions.count(Action.ROLL_BACK) == (action == "back")
    assert not set_traffic(seen, MODEL, release.wanted)


def test_killed_before_the_note_nothing_is_done_twice(
    releasing: Releasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(releasing)

    def killed(self: ReleaseLedger, release: Release) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ReleaseLedger, "mark_moved", killed)
        with pytest.raises(KeyboardInterrupt):
            releasing.settle(decided(releasing, BACK))
    releasing.finish(MODEL)
    releasing.finish(MODEL)
    assert len(releasing.champions.taken_back) == 1


def test_a_mover_that_was_overtaken_sets_what_is_wanted_now(releasing: Releasing) -> None:
    begun(releasing)
    slow = decided(releasing, PROMOTE)
    releasing.settle(releasing.ledger.decide(slow, BACK, "Amal"))
    end = releasing.settle(slow)  # sets a quarter, then learns that it is over
    assert end.state == "rolled_back"
    assert releasing.traffic.shared == Shares()
    assert releasing.traffic.at["candidate"] is None


def test_one_release_of_a_model_is_open_at_a_time(releasing: Releasing) -> None:
    def opened(model: str, stable: str, candidate: str) -> Release:
        return releasing.ledger.open(model, stable, candidate, IDLE, "a", can_split=True)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: opened(MODEL, "1", "2").release_id, range(16)))
    assert len(set(found)) == 1
    with pytest.raises(DataContractError, match="is open, so no release of version 3"):
        opened(MODEL, "1", "3")
    with pytest.raises(DataContractError, match="nothing to release"):
        opened("other", "3", "3")
    assert opened("other", "1", "3").is_open


def test_cycles_that_see_nothing_new_are_one_line_and_more_rows_another(
    releasing: Releasing,
) -> None:
    release = begun(releasing)
    many = evidence(finding(), num_labels=20_000)
    for seen in (evidence(finding()), evidence(finding()), many, many):
        releasing.ledger.decide(release, HOLD, "release flow", seen)
    entries = releasing.ledger.entries(release.release_id)
    assert [e.evidence.num_labels for e in entries if e.evidence] == [10_000, 20_000]


def test_a_person_holds_resumes_promotes_and_rolls_back_under_a_name(releasing: Releasing) -> None:
    begun(releasing)
    assert releasing.act_by_hand(MODEL, "hold", "Amal", "lunch").held_by == "Amal"
    assert releasing.act_by_hand(MODEL, "resume", "Amal", "").held_by == ""
    assert releasing.act_by_hand(MODEL, "promote", "Badr", "").step == 1
    assert releasing.traffic.shared.candidate == 25
    release = releasing.act_by_hand(MODEL, "roll_back", "Amal", "a call from the desk")
    assert release.state == "rolled_back"
    told = [
        (e.action.value, e.actor, e.reason) for e in releasing.ledger.entries(release.release_id)
    ]
    assert ("hold", "Amal", "Amal: lunch") in told
    assert told[-1] == ("roll_back", "Amal", "Amal: a call from the desk")
    with pytest.raises(DataContractError, match="no release of flight-delay is open"):
        releasing.act_by_hand(MODEL, "hold", "Amal", "")
    with pytest.raises(DataContractError, match="is no name"):
        releasing.act_by_hand(MODEL, "hold", " ", "")


def test_a_cycle_decides_by_the_log_and_repairs_what_a_restart_has_lost(
    releasing: Releasing,
) -> None:
    release = begun(releasing)
    start = release.periods[0].since
    now = start + timedelta(hours=1)
    log = FakeLog(
        Rows()
        .add(3000, start=start)
        .add(3000, track="shadow", version="2", error=0.05, start=start)
    )
    releasing.traffic.at = {"stable": "2", "candidate": None, "shadow": None}
    found = releasing.evaluate(release, log, now)
    assert found.was_repaired
    assert found.decision.rule == "errors"
    assert found.release.state == "rolled_back"
    assert releasing.traffic.at["stable"] == "1"
    entry = releasing.ledger.entries(release.release_id)[-1]
    assert entry.evidence.harms


@pytest.mark.parametrize("action", ["promote", "roll_back"])
def test_what_a_person_wanted_is_done_once_though_the_first_try_broke_off(
    releasing: Releasing, monkeypatch: pytest.MonkeyPatch, action: ByHand
) -> None:
    seen = begun(releasing)

    with monkeypatch.context() as patched:
        patched.setattr(releasing.traffic, "set_shares", _busy)
        with pytest.raises(TransientError):
            releasing.act_by_hand(MODEL, action, "Amal", "", seen)
    release = releasing.act_by_hand(MODEL, action, "Amal", "", seen)
    assert release.is_moved
    assert (release.step, release.is_open) == ((1, True) if action == "promote" else (0, False))


def test_a_cycle_that_is_tried_again_gives_no_traffic_back_to_what_was_rolled_back(
    releasing: Releasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(releasing)
    seen = releasing.act_by_hand(MODEL, "promote", "Amal", "")
    with monkeypatch.context() as patched:
        patched.setattr(releasing.champions, "take_back", _busy)
        with pytest.raises(TransientError):
            releasing.act_by_hand(MODEL, "roll_back", "Amal", "")
    assert releasing.traffic.shared.candidate == 0
    before = len(releasing.traffic.calls)
    found = evaluated(releasing, seen)
    assert found.decision.rule == "unfinished"  # it is carried out before anything is read
    assert (found.release.state, found.release.is_moved) == ("rolled_back", True)
    assert not [call for call in releasing.traffic.calls[before:] if call.startswith("shares 25")]
    again = evaluated(releasing, seen)
    assert (again.decision.rule, again.is_change) == ("closed", False)


def _busy(*_: object, **__: object) -> None:
    raise TransientError("it does not answer")


@dataclass(frozen=True)
class DamagedLabels(FakeLog):
    """A table of labels that nobody can read."""

    def labels(self, release: Release, now: datetime) -> pd.DataFrame:
        raise DataContractError("labels.parquet is damaged")


@pytest.mark.parametrize(
    ("share", "action", "rule"),
    [(0.05, Action.ROLL_BACK, "errors"), (0.0, Action.HOLD, "labels")],
    ids=["fails", "well"],
)
def test_labels_that_cannot_be_read_hold_a_release_and_keep_no_failing_version(
    releasing: Releasing, share: float, action: Action, rule: str
) -> None:
    release = begun(releasing)
    start = release.periods[0].since
    candidate = {"track": "shadow", "version": "2", "error": share, "start": start}
    rows = Rows().add(12_000, start=start).add(12_000, **candidate)
    now = start + timedelta(minutes=release.current.min_minutes + 1)
    decision = releasing.evaluate(release, DamagedLabels(rows), now).decision
    assert (decision.action, decision.rule) == (action, rule)
    assert action is Action.ROLL_BACK or "labels.parquet is damaged" in decision.reason


def test_a_cycle_gives_up_a_version_that_is_no_longer_the_champion(releasing: Releasing) -> None:
    release = begun(releasing)
    releasing.champions.now = "3"
    found = evaluated(releasing, release)
    assert found.release.state == "superseded"
    assert releasing.traffic.at == {"stable": "1", "candidate": None, "shadow": None}
    assert releasing.due(MODEL, IDLE)
    assert releasing.begin(MODEL, IDLE, "release flow").candidate == "3"


def refused_by_the_server(releasing: Releasing) -> Release:
    """A release that was begun with a candidate that cannot be loaded."""
    releasing.traffic.broken = "2"
    with pytest.raises(TracksRefusedError):
        begun(releasing)
    return releasing.ledger.open_release(MODEL)


def test_a_candidate_that_cannot_be_loaded_is_rolled_back_after_a_while(
    releasing: Releasing,
) -> None:
    release, now = refused_by_the_server(releasing), datetime.now(UTC)
    for minutes in (0, 9):
        with pytest.raises(TracksRefusedError):
            releasing.evaluate(release, FakeLog(), now + timedelta(minutes=minutes))
    found = releasing.evaluate(release, FakeLog(), now + timedelta(minutes=11))
    assert (found.decision.rule, found.release.state) == ("not_loaded", "rolled_back")
    assert releasing.traffic.at == {"stable": "1", "candidate": None, "shadow": None}
    assert releasing.champions.champion(MODEL) == "1"


def test_a_person_rolls_back_a_candidate_that_cannot_be_loaded_at_once(
    releasing: Releasing,
) -> None:
    refused_by_the_server(releasing)
    release = releasing.act_by_hand(MODEL, "roll_back", "Amal", "it will never load")
    assert (release.state, release.is_moved) == ("rolled_back", True)
    assert releasing.champions.champion(MODEL) == "1"


def test_without_a_gateway_the_last_step_alone_is_taken(releasing: Releasing) -> None:
    releasing.traffic.can_split = False
    release = begun(releasing)
    assert (release.current.name, len(release.steps)) == ("all", 1)
    assert releasing.traffic.at["stable"] == "2"
    assert release.periods[0].shares.candidate == 100
    end = releasing.settle(decided(releasing, BACK))
    assert releasing.traffic.at["stable"] == "1"
    assert not end.is_open


def test_a_server_that_starts_again_begins_with_what_the_release_wants(
    releasing: Releasing,
) -> None:
    url = str(releasing.ledger.engine.url)
    assert tracks_at_start(url, MODEL, "2") is None
    begun(releasing)
    assert tracks_at_start(url, MODEL, "2") == {"stable": "1", "candidate": "2", "shadow": "2"}
    left = decided(releasing, BACK)
    assert tracks_at_start(url, MODEL, "2") == {"stable": "1", "candidate": None, "shadow": None}
    releasing.settle(left)
    assert tracks_at_start(url, MODEL, "1") is None
    stays = tracks_at_start(url, MODEL, "2")  # the registry could not move the alias
    assert stays["stable"] == "1"


def test_an_alias_that_was_taken_back_after_a_release_takes_all_traffic_along(
    releasing: Releasing,
) -> None:
    begun(releasing)
    assert releasing.follow_roll_back(MODEL) is None
    for _ in STEPS:
        releasing.settle(decided(releasing, PROMOTE))
    assert releasing.traffic.at["stable"] == "2"
    assert releasing.follow_roll_back(MODEL) is None
    releasing.champions.now, releasing.champions.restored = "1", True
    assert releasing.follow_roll_back(MODEL) == "1"
    assert releasing.traffic.at == {"stable": "1", "candidate": None, "shadow": None}
    assert releasing.follow_roll_back(MODEL) is None
    assert not releasing.due(MODEL, IDLE)


def test_a_release_that_an_earlier_version_stored_is_read_without_what_is_gone(
    releasing: Releasing,
) -> None:
    release = begun(releasing)
    old = json.loads(release.config.model_dump_json()) | {
        "alpha": {"errors": 0.01},
        "slow_factor": 2,
    }
    old["steps"][1]["mirror_percent"] = 20
    with transaction(releasing.ledger.engine) as connection:
        connection.execute(update(tables.releases).values(config=json.dumps(old)))
    assert releasing.ledger.release(release.release_id).steps[1].mirror_percent == 20


def test_nothing_is_due_without_a_new_champion(releasing: Releasing) -> None:
    assert releasing.due(MODEL, IDLE)
    assert not releasing.due(MODEL, IDLE.model_copy(update={"enabled": False}))
    for version in (None, "1"):
        others = replace(releasing, champions=FakeChampions(now=version))
        assert not others.due(MODEL, IDLE)
    with pytest.raises(DataContractError, match="no champion"):
        replace(releasing, champions=FakeChampions(now=None)).begin(MODEL, IDLE, "a test")
    releasing.traffic.at["stable"] = None
    with pytest.raises(DataContractError, match="no version of flight-delay in track"):
        begun(releasing)
