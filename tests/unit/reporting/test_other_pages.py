"""The page of a search, and the outcome of a model compression."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tasks.contracts.evaluation import StudentReport
from tasks.contracts.release import CompressionResult, GateResult, PromotionDecision
from tasks.contracts.training import ModelCompression, StudyRecord
from tasks.reporting import search
from tasks.reporting.gallery import as_data_url
from tasks.reporting.page import describe_compression, write_compression
from tests.support.data.builders import metric_set, splits, version_ref
from tests.support.registry.builders import comparison
from tests.support.reporting.studies import study, trial


def whole() -> StudyRecord:
    return study(
        trial(0, auc=0.70),
        trial(1, "pruned", auc=0.62, reason="rule median after epoch 2 of 8"),
        trial(2, "failed", auc=None, reason="the loss is <nan> & more"),
        trial(3, auc=0.74, attempts=2),
        trial(4, auc=0.70),
    )


def loads_nothing(page: str) -> bool:
    plain = page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    return "<script" not in page and "http" not in plain


def test_the_page_of_a_search_shows_every_trial_and_why_it_ended(tmp_path: Path) -> None:
    record = whole()
    page = search.write_search_page(record, tmp_path, search.gallery(record))
    assert page == tmp_path / record.study / "search.html"
    text = page.read_text(encoding="utf-8")
    for words in ("the loss is &lt;nan&gt; &amp; more", "taken up 2 times", "3 complete, 1 pruned"):
        assert words in text, words
    assert text.count("<tr") == 1 + len(record.trials)
    assert loads_nothing(text)
    assert StudyRecord.model_validate_json(page.with_name("search.json").read_text()) == record


@pytest.mark.parametrize(
    "record",
    [
        whole(),
        study(),
        study(trial(0, "failed", auc=None), importance={}),
        study(trial(0, auc=math.nan), trial(1, auc=math.inf), importance={}),
        study(*[trial(n, auc=0.5) for n in range(300)]),
        study(trial(0, point={"learning_rate": 5.0, "dropout": -3.0, "hidden_sizes": "[32]"})),
    ],
    ids=["usual", "empty", "all failed", "not finite", "many alike", "outside the space"],
)
def test_pictures_of_a_search_are_drawn_whatever_came_out(record: StudyRecord) -> None:
    pictures = search.gallery(record)
    assert "</html>" in search.render_search_page(record, pictures)
    for drawing in pictures.values():
        ElementTree.fromstring(str(drawing))
        assert as_data_url(drawing).startswith("data:image/svg+xml")
        assert "nan" not in str(drawing)


def test_a_search_over_a_regression_is_told_in_r2() -> None:
    trials = [trial(n, auc=None, r2=0.9 + 0.01 * n, epochs=[]) for n in range(3)]
    record = study(*trials, task="regression", best=2)
    html = search.render_search_page(record, search.gallery(record))
    assert "Best validation R²" in html
    assert "AUC" not in html


def result(
    *, distils: bool = True, refusal: str | None = None, promoted: bool = True
) -> CompressionResult:
    gain = comparison("control run", 0.002)
    judged = StudentReport(
        window=splits().test,
        parent=metric_set(0.7512),
        student=metric_set(0.7498),
        to_parent=comparison("parent", -0.0014),
        distilled=metric_set(0.7498) if distils else None,
        control=metric_set(0.7478) if distils else None,
        gain=gain if distils else None,
        result="The teacher <helped>: distilled minus control." if distils else None,
        refusal=refusal,
    )
    gate = GateResult(name="champion", passed=promoted, evidence="lower bound -0.0100")
    decision = PromotionDecision(
        candidate=version_ref(name="late", version=4),
        previous_champion=3,
        gates=(gate,),
        promoted=promoted,
    )
    return CompressionResult(
        compression=ModelCompression(
            parent=version_ref(name="late"),
            method="pruning-distillation" if distils else "pruning",
            settings={"pruned_share": 0.75, "learning_rate": None},
            parent_sizes=(512, 256),
            parent_parameters=40_000,
            is_distilled=distils,
        ),
        hidden_sizes=(128, 64),
        num_parameters=8_000,
        choice="on the validation rows the distilled network is better",
        judged=judged,
        version=None if refusal else version_ref(name="late", version=4),
        promotion=None if refusal else decision,
    )


def test_the_outcome_of_a_compression_is_told_beside_its_facts(tmp_path: Path) -> None:
    path, text = write_compression(result(), tmp_path)
    assert path == tmp_path / "compression-late-v3-pruning-distillation" / "compression.md"
    assert path.read_text() == text
    assert text.startswith("**late version 4 is the champion.**")
    for words in ("| small, distilled | 8,000 |", "small, control", "+0.0020", "The teacher"):
        assert words in text, words
    facts = json.loads(path.with_suffix(".json").read_text())
    assert CompressionResult.model_validate(facts) == result()
    assert write_compression(result(), tmp_path) == (path, text)


def test_a_refusal_a_closed_gate_and_no_teacher_are_told() -> None:
    refused = describe_compression(result(refusal="AUC 0.70 is below 0.74"))
    assert refused.startswith("**Not registered.** AUC 0.70 is below 0.74")
    closed = describe_compression(result(promoted=False))
    assert "was registered, and is not the champion" in closed
    assert "gate champion: lower bound" in closed
    alone = describe_compression(result(distils=False))
    assert "small network" in alone
    assert "distilled" not in alone.replace("pruning-distillation", "")
