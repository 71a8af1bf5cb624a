from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.evaluation import Metric, StudentReport
from tasks.contracts.release import GateResult, PromotionDecision, ShrinkingResult
from tasks.contracts.training import Shrinking
from tasks.reporting.shrinking_page import (
    announcement,
    gallery,
    render_shrinking_page,
    write_shrinking_page,
)
from tests.support.data.builders import splits
from tests.support.registry.builders import comparison, metric_set


def ref(number: int) -> ModelVersionRef:
    return ModelVersionRef(
        name="late", version=number, run_id="r", program_sha256="1" * 64, snapshot_sha256="2" * 64
    )


def result(
    *,
    teaches: bool = True,
    refusal: str | None = None,
    promoted: bool = True,
    change: float = 0.002,
) -> ShrinkingResult:
    teaching = comparison("untaught twin", change)
    judged = StudentReport(
        window=splits().test,
        parent=metric_set(0.7512),
        student=metric_set(0.7498),
        to_parent=comparison("parent", -0.0014),
        taught=metric_set(0.7498) if teaches else None,
        untaught=metric_set(0.7478) if teaches else None,
        teaching=teaching if teaches else None,
        result="The teacher <helped>: taught minus untaught." if teaches else None,
        refusal=refusal,
    )
    gate = GateResult(name="champion", passed=promoted, evidence="lower bound -0.0100")
    decision = PromotionDecision(
        candidate=ref(4), previous_champion=3, gates=(gate,), promoted=promoted
    )
    return ShrinkingResult(
        shrinking=Shrinking(
            parent=ref(3),
            method="pruning-distillation" if teaches else "pruning",
            settings={"pruned_share": 0.75, "learning_rate": None},
            parent_sizes=(512, 256),
            parent_parameters=40_000,
            is_taught=teaches,
        ),
        hidden_sizes=(128, 64),
        num_parameters=8_000,
        choice="on the validation rows the taught network is better",
        judged=judged,
        version=None if refusal else ref(4),
        promotion=None if refusal else decision,
    )


def test_the_page_says_who_won_with_the_interval_and_loads_nothing() -> None:
    page = render_shrinking_page(result(), "flights")
    assert "The teacher &lt;helped&gt;" in page
    assert "small, untaught" in page
    assert "0.0020" in page.replace("+", "")
    assert "20.0" in page  # per cent of the parameters
    assert "128-64 of 512-256" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_a_refusal_a_closed_gate_and_a_promotion_look_different() -> None:
    refused = render_shrinking_page(result(refusal="AUC 0.70 is below 0.74"), "flights")
    assert "Not registered" in refused
    assert "AUC 0.70 is below 0.74" in refused
    closed = render_shrinking_page(result(promoted=False), "flights")
    assert "did not become the champion" in closed
    assert "lower bound" in closed
    assert "Version 4 is the champion" in render_shrinking_page(result(), "flights")


def test_without_a_teacher_nothing_is_said_about_one() -> None:
    page = render_shrinking_page(result(teaches=False), "flights")
    assert "Did the teacher help?" not in page
    assert "Nobody taught the smaller network" in page
    assert "not set" in page


@pytest.mark.parametrize("teaches", [True, False])
def test_each_network_and_each_difference_has_a_row_in_the_pictures(teaches: bool) -> None:
    drawn = gallery(result(teaches=teaches))
    assert ("small, taught" in drawn["quality"]) is teaches
    assert ("small network" in drawn["quality"]) is not teaches
    assert "small minus large" in drawn["differences"]
    assert ("taught minus untaught" in drawn["differences"]) is teaches


def test_a_metric_that_is_no_number_breaks_no_page() -> None:
    odd = Metric(value=float("nan"), low=float("nan"), high=float("nan"))
    made = result(teaches=False, refusal="it is no number")
    student = made.judged.student.model_copy(update={"auc": odd})
    judged = made.judged.model_copy(update={"student": student})
    assert "it is no number" in render_shrinking_page(
        made.model_copy(update={"judged": judged}), "flights"
    )


def test_the_facts_lie_beside_the_page_and_a_repeated_call_changes_nothing(tmp_path: Path) -> None:
    page = write_shrinking_page(result(), "flights", tmp_path)
    assert page == tmp_path / "shrinking-late-v3-pruning-distillation" / "shrinking.html"
    facts = json.loads(page.with_name("shrinking.json").read_text())
    assert ShrinkingResult.model_validate(facts) == result()
    before = page.read_text()
    assert write_shrinking_page(result(), "flights", tmp_path).read_text() == before


def test_the_announcement_names_the_outcome_first() -> None:
    assert announcement(result(), "p").startswith("**late version 4 is the champion.**")
    refused = announcement(result(refusal="too weak"), "p")
    assert refused.startswith("**Not registered.** too weak")
    assert "| small, taught | 8,000 |" in refused
