from datetime import timedelta
from pathlib import Path

from tasks.contracts.rollout import Action, Entry, Period, Shares, Tally
from tasks.governance.journal import Journal
from tasks.reporting.release_page import charts, render_page, write_page
from tests.support.release.builders import MODEL, START, evidence, finding, release


def entry(number: int, reason: str = "more are needed") -> Entry:
    seen = evidence(
        finding("errors", high=None), finding("task_paired"), stable=Tally(num_requests=10)
    )
    return Entry(
        number=number,
        release_id="0" * 32,
        at=START + timedelta(hours=number),
        actor="release flow",
        action=Action.HOLD,
        rule="too_few",
        reason=reason,
        step=0,
        generation=1,
        evidence=seen if number else None,
    )


def test_a_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    page = write_page(release().summary, [entry(n) for n in range(4)], tmp_path)
    text = page.read_text()
    assert (tmp_path / "release" / f"{MODEL}.html").read_text() == text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "<script" not in text
    assert "Is version 2 as good as version 1?" in text


def test_the_head_says_who_broke_the_glass(tmp_path: Path) -> None:
    broken = {"said": "<b>down", "acts": "approve", "who": {"subject": "omar"}}
    Journal(tmp_path / "audit").append("break-glass", **broken)
    text = write_page(release().summary, [entry(0)], tmp_path).read_text()
    assert "omar broke the glass to approve" in text
    assert "&lt;b&gt;down" in text


def test_what_people_wrote_is_text_and_no_markup() -> None:
    text = render_page(
        release(held_by="<b>Amal").summary, [entry(0, "<img src=x onerror=alert(1)>")]
    )
    assert "<img" not in text
    assert "<b>Amal" not in text
    assert "Nothing was evaluated yet" in text


def test_each_metric_of_which_something_is_known_has_a_picture() -> None:
    drawn = charts(release().summary, [entry(n) for n in range(3)])
    assert list(drawn) == ["task_paired", "errors"]
    assert charts(release().summary, [entry(0)]) == {}


def test_the_end_of_a_release_is_told_in_words() -> None:
    entries = [entry(1)]
    for state, words in (
        ("released", "Version 2 answers all requests"),
        ("rolled_back", "Rolled back: version 1 answers all requests"),
        ("superseded", "another version is the champion"),
    ):
        ended = release(state=state, closed_at=START + timedelta(hours=2)).summary
        assert words in render_page(ended, entries)
    assert "No gateway splits requests" in render_page(release(can_split=False).summary, entries)
    steps = (
        Period(step=0, since=START, until=START + timedelta(hours=1), shares=Shares(mirror=100)),
        Period(step=1, since=START + timedelta(hours=1), shares=Shares(candidate=25)),
    )
    assert "quarter" in render_page(release(step=1, periods=steps).summary, entries)
