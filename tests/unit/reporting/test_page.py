"""The page: whole, in order, self-contained, and deaf to what names in the data try to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.kernel.settings import ArtifactStore
from tasks.reporting.page import prose
from tests.support.reporting.pages import DATA_DOCS, rendered
from tests.support.reporting.run_records import EVIL, hostile_record, run_record

SECTIONS = ["result", "figures", "loop", "data", "training", "judging", "conversion", "drift",
            "promotion", "lineage", "provenance"]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


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
        "8970679c4d1b", "AMD EPYC 7B13", record.dataset.snapshot.data.sha256,
    ):  # fmt: skip
        assert words in page.words, words


def test_every_picture_has_a_role_a_title_and_a_description(store: ArtifactStore) -> None:
    text, page = rendered(run_record(store), store)
    pictures = [a for tag, a in page.tags if tag == "svg" and "chart" in (a.get("class") or "")]
    assert len(pictures) == 18
    assert all(a.get("role") == "img" for a in pictures)
    assert text.count("<desc>") == len(pictures)


@pytest.mark.parametrize("make", [run_record, hostile_record])
def test_nothing_on_the_page_leads_outside_or_runs(store: ArtifactStore, make: object) -> None:
    assert callable(make)
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


def test_names_out_of_the_data_stay_text_and_nothing_is_nan(store: ArtifactStore) -> None:
    text, page = rendered(hostile_record(store), store)
    assert "<script" not in text
    assert "\x00" not in text
    assert "{{ 7*7 }}" in page.words, "a template in a name is not run"
    assert EVIL.replace("\x00", "\ufffd") in page.words
    numbers = re.findall(r"(?<![\w.])(?:nan|inf|infinity|none)(?![\w.])", page.words, re.IGNORECASE)
    assert set(numbers) <= {"none", "None"}, numbers
    assert not re.search(r'="-?(?:nan|inf)', text)


def test_two_hundred_features_are_all_in_the_table_and_twenty_in_the_picture(
    store: ArtifactStore,
) -> None:
    text, page = rendered(hostile_record(store), store)
    assert "All 200 features as a table" in page.words
    assert text.count(">steady<") + text.count(">▲ drifted<") == 200
    assert "20 of 200" in page.words


def test_what_is_missing_is_said_in_words(store: ArtifactStore) -> None:
    _, page = rendered(hostile_record(store), store)
    for words in (
        "No latency was measured.", "No slice held enough rows", "has no labels yet",
        "there is no champion", "no CPU variant was kept",
    ):  # fmt: skip
        assert words in page.words, words


def test_a_damaged_artifact_is_told_and_the_page_still_made(store: ArtifactStore) -> None:
    record = run_record(store)
    store.path(record.model.program).write_text("changed")
    _, page = rendered(record, store)
    assert "1 of 16 stored artifacts absent or damaged" in page.words


def test_a_record_with_as_little_as_the_contract_allows_makes_a_page(store: ArtifactStore) -> None:
    record = run_record(store)
    refresh = record.refresh
    bare = record.model_copy(
        update={
            "refresh": refresh.model_copy(
                update={
                    "rows": refresh.rows.model_copy(
                        update={
                            "landed": refresh.rows.landed.model_copy(update={"tables": ()}),
                            "validations": (),
                        }
                    ),
                    "validations": (),
                    "views": (),
                }
            ),
            "model": record.model.model_copy(update={"epochs": (), "config": {}}),
            "variants": (),
            "stages": (),
            "host": {},
            "promotion": record.promotion.model_copy(update={"gates": (), "promoted": False}),
            "drift": record.drift.model_copy(
                update={"features": (), "evidence": (), "reference_performance": None}
            ),
        }
    )
    _, page = rendered(bare, store)
    for words in ("No table was landed", "No view was materialized", "No gate was evaluated",
                  "No feature was compared", "No variant was built"):  # fmt: skip
        assert words in page.words, words


def test_the_page_says_what_the_snapshot_pins_and_how_to_check_it(store: ArtifactStore) -> None:
    record = run_record(store)
    _, page = rendered(record, store)
    digest = record.dataset.snapshot.data.sha256[:12]
    for words in ("flight_delay_v1, version 2", "c3c3c3c3c3c3", "2013-12-31 23:05 UTC",
                  f"python -m falaj features verify {digest}"):  # fmt: skip
        assert words in page.words, words
    _, old = rendered(hostile_record(store), store)
    assert "made by a release that kept no pins" in old.words


def test_a_line_does_not_break_inside_a_date_or_an_interval() -> None:
    drawn = prose("AUC 0.752 [0.747, 0.758] in 2013-01-01 to <b>")
    assert '<span class="nowrap">0.752 [0.747, 0.758]</span>' in drawn
    assert '<span class="nowrap">2013-01-01</span>' in drawn
    assert "&lt;b&gt;" in drawn
