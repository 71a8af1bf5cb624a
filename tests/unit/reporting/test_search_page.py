from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tasks.contracts.training import StudyRecord
from tasks.reporting.drawing import as_data_url
from tasks.reporting.search import gallery, readable, render_search_page, write_search_page
from tests.support.reporting.studies import study, trial


def whole() -> StudyRecord:
    return study(
        trial(0, auc=0.70),
        trial(1, "pruned", auc=0.62, reason="rule median after epoch 2 of 8"),
        trial(2, "failed", auc=None, reason="the loss is <nan> & more"),
        trial(3, auc=0.74, attempts=2),
        trial(4, auc=0.70, repeats=0),
    )


def test_the_page_shows_every_trial_and_why_it_ended(tmp_path: Path) -> None:
    record = whole()
    page = write_search_page(record, tmp_path)
    assert page == tmp_path / record.study / "search.html"
    text = page.read_text(encoding="utf-8")
    assert "the loss is &lt;nan&gt; &amp; more" in text
    assert "same point as trial 0" in text
    assert "taken up 2 times" in text
    assert "3 complete, 1 pruned, 1 failed" in text
    assert text.count("<tr") == 1 + len(record.trials)
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    facts = json.loads((page.parent / "search.json").read_text())
    assert StudyRecord.model_validate(facts) == record


@pytest.mark.parametrize(
    "record",
    [
        whole(),
        study(),
        study(trial(0)),
        study(trial(0, "failed", auc=None), importance={}),
        study(trial(0, auc=math.nan), trial(1, auc=math.inf), importance={}),
        study(*[trial(n, auc=0.5) for n in range(300)]),
        study(
            trial(0, point={"learning_rate": 5.0, "dropout": -3.0, "hidden_sizes": "[32]"}),
        ),
    ],
    ids=["usual", "empty", "one", "all failed", "not finite", "many alike", "outside the space"],
)
def test_pictures_are_drawn_whatever_came_out(record: StudyRecord) -> None:
    assert "</html>" in render_search_page(record)
    for drawing in gallery(record).values():
        ElementTree.fromstring(str(drawing))
        assert as_data_url(drawing).startswith("data:image/svg+xml")
        assert "nan" not in str(drawing).replace("nance", "")


@pytest.mark.parametrize(
    ("value", "words"),
    [("[64, 32]", "64, 32"), ('"ddp"', "ddp"), ("true", "True"), (8, "8"), (0.012345, "0.0123")],
)
def test_values_are_written_as_people_read_them(value: object, words: str) -> None:
    assert readable(value) == words
