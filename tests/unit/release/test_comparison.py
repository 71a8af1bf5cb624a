from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tasks.kernel.errors import DataContractError
from tasks.release.comparison import compare
from tasks.release.config import ReleaseConfig
from tasks.release.counts import Stratum, log_ratio_evidence
from tasks.release.evidence import check_labels, no_labels, observe
from tasks.release.policy import decide
from tasks.release.records import Action, Evidence, Period, Release, Shares
from tests.support.release.builders import CONFIG, MODEL, START, Rows, release

NOW = START + timedelta(hours=2)
SPLIT = release(step=1)


def seen(home: Path, known: Release, labels: pd.DataFrame | None = None) -> Evidence:
    table = no_labels() if labels is None else labels
    return compare(observe(home, known, table, NOW), known)


def test_nothing_logged_is_no_evidence(tmp_path: Path) -> None:
    found = seen(tmp_path, release())
    assert found.step_requests == 0
    assert not found.harms
    assert decide(release(), found, NOW).rule == "too_few"


def test_rows_count_for_a_version_by_slot_and_version(tmp_path: Path) -> None:
    rows = Rows().add(30).add(30, slot="shadow", version="2")
    rows.add(9, slot="stable", version="2", ids="x").add(7, version="7", ids="y")
    rows.add(5, start=START, ids="early")
    rows.write(tmp_path)
    rows.write(tmp_path, "merged-1")  # for a moment a row is there twice
    found = seen(tmp_path, release())
    assert (found.stable.num_requests, found.shadow.num_requests) == (30, 30)
    assert found.candidate.num_requests == 0
    assert found.step_requests == 30


def test_parts_that_were_merged_are_not_read_again(tmp_path: Path) -> None:
    Rows().add(30).write(tmp_path)
    Rows().add(30, ids="other").write(
        tmp_path, "merged-1", {"falaj.replaces": "part-0.parquet,part-9.parquet"}
    )
    assert seen(tmp_path, release()).stable.num_requests == 30


def test_a_part_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    Rows().add(30).write(tmp_path)
    (written,) = tmp_path.rglob("part-0.parquet")
    written.with_name(".aside-1-part-1.parquet").write_bytes(written.read_bytes()[:100])
    assert seen(tmp_path, release()).stable.num_requests == 30


def test_failures_of_copies_are_held_against_the_candidate(tmp_path: Path) -> None:
    Rows().add(3000, error=0.001).add(3000, slot="shadow", version="2", error=0.02).write(tmp_path)
    found = seen(tmp_path, release())
    assert decide(release(), found, NOW).rule == "errors"
    errors = found.finding("errors")
    assert errors is not None
    assert errors.low is not None
    assert errors.low > 1.1


def test_refusals_before_a_version_was_asked_are_nobodys(tmp_path: Path) -> None:
    rows = Rows().add(2000).add(2000, slot="shadow", version="2", error=0.3, word="rate_limited")
    rows.write(tmp_path)
    found = seen(tmp_path, release())
    assert found.shadow.num_failed == 0
    assert not found.harms


@pytest.mark.parametrize("word", ["not_computed", "bad_request", "features_refused"])
def test_what_the_version_before_answers_is_not_the_clients_fault(
    tmp_path: Path, word: str
) -> None:
    rows = Rows().add(2000).add(2000, slot="shadow", version="2", error=0.05, word=word)
    rows.write(tmp_path)
    assert decide(release(), seen(tmp_path, release()), NOW).rule == "errors"


def test_requests_that_both_versions_refuse_are_held_against_none(tmp_path: Path) -> None:
    rows = Rows().add(9000, error=0.3, word="bad_request")
    rows.add(3000, slot="candidate", version="2", error=0.3, word="bad_request", ids="c")
    rows.write(tmp_path)
    found = seen(tmp_path, SPLIT)
    assert not found.harms
    assert not found.faults


def test_a_candidate_alone_is_not_blamed_for_requests_that_nothing_answers(tmp_path: Path) -> None:
    known = release(can_split=False)
    Rows().add(2000, version="2", error=0.3, word="bad_request").write(tmp_path)
    assert not seen(tmp_path, known).harms


def test_an_answer_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    def sometimes(rng: np.random.Generator, number: int) -> Any:
        return np.where(rng.random(number) < 0.1, np.inf, rng.random(number))

    Rows().add(2000).add(2000, slot="shadow", version="2", score=sometimes).write(tmp_path)
    found = seen(tmp_path, release())
    assert found.shadow.num_failed > 100
    assert decide(release(), found, NOW).rule == "errors"


@pytest.mark.parametrize("word", ["overloaded", "deadline"])
def test_copies_that_a_busy_server_drops_are_not_held_against_the_candidate(
    tmp_path: Path, word: str
) -> None:
    rows = Rows().add(2000).add(2000, slot="shadow", version="2", error=0.3, word=word)
    rows.write(tmp_path)
    assert not seen(tmp_path, release()).harms


def test_copies_that_were_dropped_are_none_that_the_candidate_answered(tmp_path: Path) -> None:
    rows = Rows().add(600, error=0.1)
    rows.add(600, slot="shadow", version="2", error=1, word="overloaded").write(tmp_path)
    found = seen(tmp_path, release())
    assert found.step_requests == 0
    errors = found.finding("errors")
    assert errors is not None
    assert errors.num == 0  # a copy that was not computed says nothing of its original's failure


def test_a_feed_that_breaks_both_is_not_the_candidates_fault(tmp_path: Path) -> None:
    rows = Rows().add(9000, error=0.4)
    rows.add(3000, slot="candidate", version="2", error=0.4, ids="c").write(tmp_path)
    late = NOW - timedelta(minutes=95)
    found = compare(observe(tmp_path, SPLIT, no_labels(), late), SPLIT)
    assert not found.harms
    assert "depend on is broken" in found.faults[0]
    assert decide(SPLIT, found, late).rule == "common_fault"


def test_a_candidate_that_fails_more_is_found_in_split_traffic(tmp_path: Path) -> None:
    rows = Rows().add(9000, error=0.005)
    rows.add(3000, slot="candidate", version="2", error=0.03, ids="c").write(tmp_path)
    assert decide(SPLIT, seen(tmp_path, SPLIT), NOW).action is Action.ROLL_BACK


def test_one_client_that_fails_all_the_time_counts_once_where_clients_stick(
    tmp_path: Path,
) -> None:
    rows = Rows().add(9000, subjects=900)
    rows.add(2900, slot="candidate", version="2", ids="c", subjects=300)
    rows.add(300, slot="candidate", version="2", ids="bad", error=1.0, subjects=1).write(tmp_path)
    sticky = release(CONFIG.model_copy(update={"sticky": True}), step=1)
    assert not seen(tmp_path, sticky).harms
    assert seen(tmp_path, SPLIT).harms


def test_a_client_that_stuck_to_the_candidate_counts_in_its_first_step_alone(
    tmp_path: Path,
) -> None:
    steps = (*CONFIG.steps[:2], CONFIG.steps[1].model_copy(update={"name": "again"}))
    config = CONFIG.model_copy(update={"sticky": True, "steps": (*steps, CONFIG.steps[2])})
    turn = START + timedelta(minutes=30)
    shares = Shares(candidate=25, sticky=True)
    known = release(
        config,
        step=2,
        periods=(
            Period(step=1, since=START, until=turn, shares=shares),
            Period(step=2, since=turn, shares=shares),
        ),
    )
    rows = Rows()
    for number, start in enumerate((START, turn)):
        rows.add(
            40,
            slot="candidate",
            version="2",
            ids=f"bad{number}",
            error=1.0,
            subjects=1,
            start=start + timedelta(minutes=1),
        )
    rows.add(40, ids="s", start=turn + timedelta(minutes=1))
    rows.write(tmp_path)
    found = seen(tmp_path, known).finding("errors")
    assert found is not None
    assert found.num == 1


def test_clients_that_meet_both_versions_count_by_their_requests(tmp_path: Path) -> None:
    rows = Rows().add(3000, subjects=3, error=0.02, names="c")
    rows.add(1000, slot="candidate", version="2", ids="c", subjects=3, error=0.02, names="c").write(
        tmp_path
    )
    sticky = release(CONFIG.model_copy(update={"sticky": True}), step=1)
    evidence = seen(tmp_path, sticky)
    found = evidence.finding("errors")
    assert found is not None
    assert found.num > 50
    assert not evidence.harms
    assert not evidence.split_fault


def test_requests_that_are_not_split_as_asked_are_noticed(tmp_path: Path) -> None:
    rows = Rows().add(6000).add(6000, slot="candidate", version="2", ids="c")
    rows.write(tmp_path)
    found = seen(tmp_path, SPLIT)
    assert "50.0% where 25.0% was asked" in found.split_fault
    assert decide(SPLIT, found, NOW).rule == "split"


def test_a_slow_candidate_is_found(tmp_path: Path) -> None:
    rows = Rows().add(9000).add(3000, slot="candidate", version="2", ids="c", latency_us=5000)
    rows.write(tmp_path)
    found = seen(tmp_path, SPLIT)
    assert [f.metric for f in found.harms] == ["latency"]
    alike = Rows().add(9000).add(3000, slot="candidate", version="2", ids="c")
    alike.write(tmp_path, "part-0")
    assert not seen(tmp_path, SPLIT).harms


def test_copies_that_come_in_larger_batches_are_not_slow_for_that(tmp_path: Path) -> None:
    copied = {"slot": "shadow", "version": "2"}
    Rows().add(4000).add(4000, **copied, batch_rows=4).write(tmp_path)  # type: ignore[arg-type]
    assert not seen(tmp_path, release()).harms
    Rows().add(4000).add(4000, **copied, latency_us=6000).write(tmp_path)  # type: ignore[arg-type]
    assert [f.metric for f in seen(tmp_path, release()).harms] == ["latency"]


def in_batches(rows: Rows, slot: str, size: int, slow: range = range(0)) -> None:
    """As if so many requests of a slot had been computed together, some batches slowly."""
    mine = [row for row in rows.rows if row["slot"] == slot]
    for number, begin in enumerate(range(0, len(mine), size)):
        batch = mine[begin : begin + size]
        took = batch[0]["compute_us"] * (50 if number in slow else 1)
        ended = batch[-1]["event_timestamp"] + timedelta(microseconds=took)
        for row in batch:
            waited = (ended - row["event_timestamp"]) // timedelta(microseconds=1)
            row.update(compute_us=took, batch_rows=size, latency_us=waited)


def test_one_slow_batch_of_copies_is_one_slow_event(tmp_path: Path) -> None:
    counted = []
    for slow in (range(0), range(60, 61), range(100)):
        rows = Rows().add(4000).add(4000, slot="shadow", version="2")
        in_batches(rows, "stable", 40)
        in_batches(rows, "shadow", 40, slow)
        rows.write(tmp_path)
        latency = seen(tmp_path, release()).finding("latency")
        assert latency is not None
        counted.append((latency.num, latency.is_harm))
    (alike, _), (once, is_harm), (always, is_found) = counted
    assert (once - alike, is_harm) == (1, False)  # the machine was elsewhere for a moment
    assert is_found
    assert always <= 75  # of a hundred batches the first 25 say what is slow


def test_where_requests_are_split_and_copied_no_failure_is_bet_on_twice(tmp_path: Path) -> None:
    shares = Shares(candidate=25, mirror=100)
    both = release(step=1, periods=(Period(step=1, since=START, shares=shares),))
    rows = Rows().add(900, error=0.2).add(900, slot="shadow", version="2", error=0.2)
    rows.add(300, slot="candidate", version="2", error=0.2, ids="c").write(tmp_path)
    errors = seen(tmp_path, both).finding("errors")
    assert errors is not None
    frame = pd.DataFrame(rows.rows)
    stable, copy, mine = (
        frame[frame["slot"] == slot]["error"].notna().to_numpy()
        for slot in ("stable", "shadow", "candidate")
    )
    paired = Stratum(int((copy & ~stable).sum()), int((copy ^ stable).sum()), 0.5)
    split = Stratum(int(mine.sum()), int(mine.sum() + stable.sum()), 0.25, also=paired)
    assert errors.log_evidence == pytest.approx(log_ratio_evidence([split], 1.1))
    assert errors.num == split.total + paired.total


def test_scores_that_are_elsewhere_are_found_and_other_scores_tolerated(tmp_path: Path) -> None:
    rows = Rows().add(4000)
    rows.add(4000, slot="shadow", version="2", score=lambda rng, n: rng.random(n) * 0.4)
    rows.write(tmp_path)
    assert [f.metric for f in seen(tmp_path, release()).harms] == ["scores"]
    near = Rows().add(4000)
    near.add(4000, slot="shadow", version="2", score=lambda rng, n: rng.random(n) * 0.9)
    near.write(tmp_path)
    assert not seen(tmp_path, release()).harms


def labelled(quality: float, *, copies: bool = True) -> tuple[Rows, pd.DataFrame]:
    """Pairs of scores of 8,000 requests, the candidate's of some quality, and their labels."""
    rng = np.random.default_rng(11)
    truth = (rng.random(8000) < 0.25).astype(float)
    common = rng.normal(size=8000)
    mine = 0.8 * common + 0.6 * rng.normal(size=8000)
    stable = 1 / (1 + np.exp(-(common + truth)))
    candidate = 1 / (1 + np.exp(-(mine + quality * truth)))
    rows = Rows().add(8000, score=lambda _, n: stable, latency_us=900)
    if copies:
        rows.add(8000, slot="shadow", version="2", score=lambda _, n: candidate, latency_us=900)
    labels = pd.DataFrame({"request_id": [f"r{i}" for i in range(8000)], "label": truth})
    return rows, labels


def test_a_worse_ranking_of_the_same_requests_rolls_back(tmp_path: Path) -> None:
    rows, labels = labelled(0.6)
    rows.write(tmp_path)
    found = seen(tmp_path, release(), labels)
    assert [f.metric for f in found.harms] == ["task_paired"]
    assert found.num_labels == 8000
    assert found.stable.task_metric is not None
    assert found.stable.task_metric == pytest.approx(0.76, abs=0.02)
    rows, labels = labelled(1.0)
    rows.write(tmp_path)
    assert not seen(tmp_path, release(), labels).harms


def test_labels_that_come_in_another_order_are_taken_as_they_became_known(tmp_path: Path) -> None:
    rows, labels = labelled(0.9)
    rows.write(tmp_path)
    shuffled = labels.sample(frac=1, random_state=1)
    known = shuffled.assign(labelled_at=pd.date_range(START, periods=len(labels), freq="s"))
    first = seen(tmp_path, release(), known).finding("task_paired")
    second = seen(tmp_path, release(), known.sample(frac=1, random_state=2)).finding("task_paired")
    assert first == second
    assert first != seen(tmp_path, release(), labels).finding("task_paired")


def test_a_regression_is_compared_by_its_errors(tmp_path: Path) -> None:
    rows, labels = labelled(1.0)
    rows.write(tmp_path)
    config = ReleaseConfig(steps=CONFIG.steps, task="absolute_error", sticky=False)
    found = seen(tmp_path, release(config), labels)
    finding = found.finding("task_paired")
    assert finding is not None
    assert "absolute error" in finding.unit
    assert finding.num == 8000


def test_each_version_on_its_own_rows_is_compared_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    truth = (rng.random(12_000) < 0.4).astype(float)
    scores = (
        np.where(np.arange(12_000) < 9000, truth * 0.5, -truth * 0.5) + rng.random(12_000) * 0.5
    )
    rows = Rows().add(9000, score=lambda _, n: scores[:9000])
    rows.add(3000, slot="candidate", version="2", ids="c", score=lambda _, n: scores[9000:])
    rows.write(tmp_path)
    ids = [*(f"r{i}" for i in range(9000)), *(f"c{i}" for i in range(3000))]
    labels = pd.DataFrame({"request_id": ids, "label": truth})
    assert "task_split" in [f.metric for f in seen(tmp_path, SPLIT, labels).harms]


def test_alone_a_candidate_is_judged_by_a_fixed_bound(tmp_path: Path) -> None:
    alone = release(can_split=False)
    Rows().add(500, version="2", error=0.2).write(tmp_path)
    assert decide(alone, seen(tmp_path, alone), NOW).rule == "errors"
    Rows().add(500, version="2", error=0.01).write(tmp_path)
    assert decide(alone, seen(tmp_path, alone), NOW).rule == "passed"


def test_each_period_counts_for_its_own_split(tmp_path: Path) -> None:
    turn = START + timedelta(minutes=30)
    rows = Rows().add(1000).add(1000, slot="shadow", version="2")
    rows.add(750, ids="s", start=turn + timedelta(minutes=1))
    rows.add(250, ids="c", slot="candidate", version="2", start=turn + timedelta(minutes=1))
    rows.write(tmp_path)
    known = release(
        step=1,
        periods=(
            Period(step=0, since=START, until=turn, shares=Shares(mirror=100)),
            Period(step=1, since=turn, shares=Shares(candidate=25)),
        ),
    )
    found = seen(tmp_path, known)
    assert found.step_requests == 250
    assert (found.shadow.num_requests, found.stable.num_requests) == (1000, 1750)


def test_labels_that_are_none_are_refused_with_a_sentence() -> None:
    with pytest.raises(DataContractError, match="lack the column label"):
        check_labels(pd.DataFrame({"request_id": ["a"]}))
    with pytest.raises(DataContractError, match="is no number"):
        check_labels(pd.DataFrame({"request_id": ["a"], "label": ["late"]}))
    moments = pd.to_datetime([START, START + timedelta(hours=1)])
    twice = pd.DataFrame({"request_id": ["a", "a"], "label": [0.0, 1.0], "labelled_at": moments})
    assert check_labels(twice)["label"].tolist() == [1.0]


def test_a_part_that_is_none_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "predictions" / f"model={MODEL}" / f"day={START.date()}"
    folder.mkdir(parents=True)
    (folder / "part-1.parquet").write_bytes(b"half a par")
    with pytest.raises(DataContractError, match=r"part-1\.parquet.*Nothing was decided"):
        seen(tmp_path, release())
