"""The page: whole, in order, self-contained, and deaf to what names in the data try to be."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from tasks.contracts.evaluation import Metric
from tasks.contracts.release import Approval
from tasks.kernel.settings import ArtifactStore
from tasks.reporting import facts
from tasks.reporting.page import draw_quality
from tasks.reporting.pictures import draw
from tests.support.data.builders import YEAR, changed
from tests.support.reporting.pages import DATA_DOCS, rendered
from tests.support.reporting.run_records import EVIL, hostile_record, regression_record, run_record

SECTIONS = ["result", "figures", "loop", "data", "training", "judging", "conversion", "drift",
            "promotion", "lineage", "provenance"]  # fmt: skip


def test_sections_come_in_the_order_in_which_a_customer_asks(store: ArtifactStore) -> None:
    _, page = rendered(run_record(store), store)
    assert [a["id"] for tag, a in page.tags if tag == "section"] == SECTIONS
    links = [a["href"] or "" for tag, a in page.tags if tag == "a"]
    linked = [link[1:] for link in links if link != DATA_DOCS]
    assert set(linked) <= set(SECTIONS), "each link of the page leads somewhere on it"


def test_the_page_names_the_facts_of_the_run(store: ArtifactStore) -> None:
    record = run_record(store)
    _, page = rendered(record, store)
    for words in (
        record.question, record.run_id, "Promoted: version 3 is the champion", "327,346", "8,255",
        "0.752", "[0.747, 0.758]", "0.0412 ms", "scikit-learn gradient boosting", "cancelled",
        "carrier_stats", "tensorrt-fp16", "no NVIDIA device was found", "better than the champion",
        "8970679c4d1b", "AMD EPYC 7B13", "Latency of one row against AUC",
        "Price of a million rows against AUC", record.dataset.snapshot.data.sha256,
    ):  # fmt: skip
        assert words in page.words, words


@pytest.mark.parametrize("make", [run_record, hostile_record])
def test_nothing_on_the_page_leads_outside_or_runs(store: ArtifactStore, make: Any) -> None:
    text, page = rendered(make(store), store)
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert (policy or "").startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert "script" not in {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in {"src", "href", "action", "data", "xlink:href"}:
                assert (value or "").startswith(("#", "data:", DATA_DOCS)), (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", text)


@pytest.mark.parametrize("make", [run_record, regression_record])
def test_the_quality_of_a_model_is_drawn_as_files(store: ArtifactStore, make: Any) -> None:
    for name, text in draw_quality(make(store).evaluation).items():
        assert name.endswith(".svg")
        assert ElementTree.fromstring(text).findtext(".//{*}style")


def test_names_out_of_the_data_stay_text_and_nothing_is_nan(store: ArtifactStore) -> None:
    text, page = rendered(hostile_record(store), store)
    assert "<script" not in text
    assert "\x00" not in text
    assert "{{ 7*7 }}" in page.words, "a template in a name is not run"
    assert EVIL.replace("\x00", "\ufffd") in page.words
    numbers = re.findall(r"(?<![\w.])(?:nan|inf|infinity|none)(?![\w.])", page.words, re.IGNORECASE)
    assert set(numbers) <= {"none", "None"}, numbers
    assert not re.search(r'="-?(?:nan|inf)', text)


def test_a_record_with_as_little_as_the_contract_allows_makes_a_page(store: ArtifactStore) -> None:
    lists = (
        "refresh.rows.landed.tables", "refresh.rows.validations", "refresh.validations",
        "refresh.views", "model.epochs", "variants", "stages", "promotion.gates",
        "drift.features", "drift.evidence",
    )  # fmt: skip
    less = {"model.config": {}, "host": {}, "promotion.promoted": False}
    changes = {**dict.fromkeys(lists, ()), **less, "drift.reference_performance": None}
    bare = changed(run_record(store), changes)

    _, page = rendered(bare, store)
    for words in ("No table was landed", "No view was materialized", "No gate was evaluated",
                  "No feature was compared", "No variant was built"):  # fmt: skip
        assert words in page.words, words


def test_a_page_of_another_outcome_says_so(store: ArtifactStore) -> None:
    record = run_record(store)
    gates = tuple(
        g.model_copy(update={"passed": n > 1}) for n, g in enumerate(record.promotion.gates)
    )
    known = {"state": "rejected", "asked": YEAR.start, "deadline": YEAR.end, "approver": "Amal"}
    rejected = Approval.model_validate({**known, "comment": "", "answered": YEAR.start})
    for changes, tone, words in (
        ({"previous_champion": None}, "good", "it is the first."),
        ({"previous_champion": 3}, "good", "Version 3 stays the champion"),
        ({"gates": gates, "promoted": False}, "bad", "Refused: data was validated, better"),
        ({"gates": gates, "promoted": False}, "bad", "version 2 stays the champion"),
        ({"promoted": False}, "care", "Version 3 was not moved"),
        ({"promoted": False, "approval": rejected}, "care", "was rejected by Amal"),
    ):
        decision = record.promotion.model_copy(update=changes)
        result = facts.promotion_result(changed(record, {"promotion": decision}))
        assert result.tone == tone
        assert words in f"{result.headline} {result.detail}"


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.001, 0.003, "the candidate is better"),
        (-0.003, -0.001, "the candidate is worse"),
        (0.0, 0.002, "these rows cannot tell the two apart"),
        (float("nan"), 0.002, "its interval could not be computed"),
    ],
)
def test_a_comparison_claims_only_what_its_interval_allows(
    low: float, high: float, words: str
) -> None:
    assert facts.meaning(Metric(value=0.001, low=low, high=high)) == words


def test_the_page_shows_goals_and_costs(store: ArtifactStore) -> None:
    record = run_record(store)
    assert {c.goal: (c.variant, c.rule) for c in facts.choices(record)} == {
        "one-row": ("onnx-fp32", "Best at one-row."),
        "bulk": ("openvino-fp32", "Best at bulk."),
        "edge": ("no variant", "Best at edge."),
    }
    _, page = rendered(record, store)
    for words in ("What serves which goal", "240,000", "0.04 USD an hour", "batch 1: 0.0404 ms"):
        assert words in page.words, words


def test_the_page_of_a_regression_speaks_of_nothing_else(store: ArtifactStore) -> None:
    record = regression_record(store)
    html, page = rendered(record, store)
    for words in (
        "R² on the test window", "the baseline has 300.0, skill 0.650", "Change of skill",
        "The model errs less than the baseline last_week", "Mean absolute error by weekday",
        "R² change", "in standard deviations of the label", "RMSE ratio", "+21.8 [", "1.120",
        "between the predictions of the variant", "RMSE difference, vehicles (left is better)",
    ):  # fmt: skip
        assert words in page.words, words
    for word in ("AUC", "Brier", "base rate", "positive", "scores"):
        assert word not in page.words, word
    assert "r2_score" in html
    days = [part.value for part in facts.slices_by_column(record.evaluation)["weekday"]]
    assert days == ["Friday", "Monday", "Sunday"], "in order of their error"
    assert {"observed", "residuals", "learning-curve"} == set(draw(record).gallery())


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("gradient-boosting", "Boosted trees of 45,313 thresholds and leaves"),
        ("average", "is the mean of the best epoch and the trees"),
        ("my_package:build", "The module of my_package:build"),
    ],
)
def test_the_page_says_what_was_trained(store: ArtifactStore, model: str, says: str) -> None:
    record = run_record(store)
    made = record.model.model_copy(update={"config": {"model": model}})
    assert says in facts.learned(made).replace(f"{made.num_parameters:,}", "45,313")
    assert "A network of" in facts.learned(record.model)
