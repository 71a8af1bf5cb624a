"""The page of a replay: what a customer reads, and that every result can be shown."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import poisson

from tasks.contracts.replay import PolicyName, ReplayResult
from tasks.reporting.gallery import as_data_url
from tasks.reporting.replay_page import (
    judgement,
    pictures,
    poisson_bound,
    render_replay,
    replay_lines,
    write_replay,
)
from tests.support.reporting.pages import Page, parsed
from tests.support.reporting.replays import replay

NAMES: tuple[PolicyName, ...] = ("never", "weekly", "monthly", "controller", "oracle")
TEXT = st.text(max_size=12) | st.just("<script>alert(1)</script>")


@st.composite
def results(draw: st.DrawFn) -> ReplayResult:
    """Results with other words, policies, parts left out and unknown numbers."""
    result = replay(draw(st.integers(0, 3)), draw(st.floats(-1, 1)))
    chosen = draw(st.sets(st.sampled_from(NAMES)))
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
    assert judged is not None
    assert judged[0] == tone
    assert f"The controller {verb}" in judged[1]
    assert judged[1] in Page(render_replay(replay(controller=gain))).words


def test_what_was_not_replayed_is_said_in_words() -> None:
    result = replay(faults=(), permuted=None)
    alone = tuple(p for p in result.policies if p.policy == "controller")
    words = Page(render_replay(result.model_copy(update={"policies": alone}))).words
    for said in ("monthly was not replayed", "No fault was injected", "No permuted year",
                 "The controller was not compared"):  # fmt: skip
        assert said in words


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
