"""The page of a replay: what a customer reads, and that every result can be shown."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import poisson
from sklearn.metrics import roc_auc_score

from tasks.contracts.replay import PolicyName, ReplayResult
from tasks.reporting.gallery import as_data_url
from tasks.reporting.replay_page import (
    command,
    judgement,
    pictures,
    poisson_bound,
    render_replay,
    replay_lines,
    write_replay,
)
from tests.support.reporting.pages import Page, parsed, run_command
from tests.support.reporting.replays import replay

NAMES: tuple[PolicyName, ...] = ("never", "monthly", "controller", "oracle")
"""Policies of every replay."""
TEXT = st.text(max_size=12) | st.just("<script>alert(1)</script>")


@st.composite
def results(draw: st.DrawFn) -> ReplayResult:
    """Results with other words, policies, parts left out and unknown numbers."""
    result = replay(draw(st.integers(0, 3)), draw(st.floats(-1, 1)))
    chosen = {*NAMES, *draw(st.sets(st.sampled_from(("weekly", "on-drift-alarm"))))}
    fault = st.sampled_from(result.faults)
    words = st.fixed_dictionaries({
        "fault": TEXT, "described": TEXT, "size": st.none() | st.floats(0, 9),
        "end": st.none() | st.just(datetime(2014, 1, 1, tzinfo=UTC)),
        "sightings": st.just(()) | fault.map(lambda one: one.sightings),
    })  # fmt: skip
    faults = st.builds(lambda one, changes: one.model_copy(update=changes), fault, words)
    return result.model_copy(update={
        "use_case": draw(TEXT), "question": draw(TEXT), "sentence": draw(TEXT),
        "policies": tuple(p for p in result.policies if p.policy in chosen),
        "recommended": draw(st.sampled_from(NAMES)),
        "faults": tuple(draw(st.lists(faults, max_size=3))),
        "permuted": draw(st.sampled_from([None, result.permuted])),
    })  # fmt: skip


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(results())
def test_any_result_is_a_valid_page_that_runs_nothing(result: ReplayResult) -> None:
    text = render_replay(result)
    tags = Page(text).tags
    assert "<script" not in text
    assert not [a for _, attrs in tags for a in attrs if a == "src" or a.startswith("on")]
    assert replay_lines(result)[-1] == result.sentence


def test_the_written_facts_read_back_and_equal_results_give_equal_bytes(tmp_path: Path) -> None:
    one, two = (write_replay(replay(), tmp_path / name) for name in "ab")
    assert one.read_bytes() == two.read_bytes()
    facts = one.with_name("replay.json").read_bytes()
    assert facts == two.with_name("replay.json").read_bytes()
    assert ReplayResult.model_validate_json(facts) == replay()


@pytest.mark.parametrize(
    ("gain", "tone", "verb"), [(0.01, "bad", "loses"), (0.0235, "care", "loses"),
                               (0.0245, "care", "gains"), (0.03, "good", "gains")],
)  # fmt: skip
def test_a_controller_that_does_not_win_is_said_as_loud(gain: float, tone: str, verb: str) -> None:
    judged = judgement(replay(controller=gain))
    assert judged[0] == tone
    assert f"The controller {verb}" in judged[1]
    assert judged[1] in Page(render_replay(replay(controller=gain))).words


def test_what_was_not_replayed_is_said_in_words() -> None:
    result = replay(faults=(), permuted=None)
    words = Page(render_replay(result)).words
    for said in ("No fault was injected", "No permuted year"):
        assert said in words


@pytest.mark.parametrize(("gain", "said"), [(0.02, "no other gains"), (0.001, "more with weekly")])
def test_who_gains_more_by_cpu_hour_is_named(gain: float, said: str) -> None:
    assert said in judgement(replay(controller=gain))[2]


@pytest.mark.parametrize("num_classes", [1, 3])
def test_the_command_computes_the_qualities_from_the_stored_scores(
    tmp_path: Path, num_classes: int
) -> None:
    result = replay()
    rng, times = np.random.default_rng(2), pd.date_range("2013-06-01", periods=300, freq="12h")
    rows = pd.DataFrame({"event_timestamp": times.tz_localize("UTC")})
    rows["label"] = rng.integers(0, max(2, num_classes), len(rows))
    expected = {}
    for name in (p.policy for p in result.policies):
        scores = rng.dirichlet(np.ones(max(2, num_classes)), len(rows))
        columns = [name] if num_classes == 1 else [f"{name}_{n}" for n in range(num_classes)]
        rows[columns] = scores[:, -len(columns) :]
        judged = rows["event_timestamp"] >= result.held_out.start
        inside = rows.loc[judged, columns].squeeze(axis=1)
        expected[name] = roc_auc_score(rows.loc[judged, "label"], inside, multi_class="ovr")
    target = tmp_path / "artifacts" / "replays" / "3" / "scores.parquet"
    target.parent.mkdir(parents=True)
    rows.to_parquet(target)
    told = run_command(command(result), tmp_path)
    printed = dict(line.split() for line in told.splitlines())
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(expected)


@pytest.mark.parametrize("seen", [0, 1, 7])
def test_the_bound_of_false_retrainings_is_the_exact_one(seen: int) -> None:
    bound = poisson_bound(seen, 4)
    assert bound is not None
    assert poisson.cdf(seen, 4 * bound) == pytest.approx(0.05)
    assert poisson_bound(seen, 0) is None


def test_pictures_are_addresses_for_the_prefect_interface() -> None:
    drawn = pictures(replay())
    assert set(drawn) == {"quality", "gain", "cost"}
    assert all(parsed(drawing) is not None for drawing in drawn.values())
    assert all(as_data_url(d).startswith("data:image/svg+xml;base64,") for d in drawn.values())
