"""Consent before promotion, asked once, bound to its evidence, never guessed."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import uuid4

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from falaj.__main__ import main
from flows.promotion import signed_in_answer
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import ModelVariant, PromotionDecision
from tasks.governance.identity import CONTROLLER, TOKEN_FILE, creator_headers
from tasks.governance.journal import Journal
from tasks.governance.verification import verify
from tasks.kernel.errors import AccessError, RegistryError
from tasks.kernel.settings import Settings
from tasks.registry.approval import Answer, close_question, outcome, reopen_question
from tasks.registry.candidate import note_trainer
from tasks.registry.config import ApprovalConfig, PromotionConfig
from tasks.registry.mlflow_registry import held_registry
from tasks.registry.promotion import answer_and_promote, find_champion_state, open_question
from tasks.registry.task import _trainer
from tests.support.registry.builders import CONFIG, World, comparison
from tests.support.services.prefect_platform import PrefectApi
from tests.support.services.sign_in import Provider, provider, write_sign_in
from tests.support.state import acts
from tests.support.suite.promises import Promise, proves

NAME = CONFIG.model_name
ASKING = PromotionConfig(approval=ApprovalConfig(enabled=True, timeout_h=24))
NOON = datetime(2014, 2, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


Presented = tuple[ModelVersionRef, EvaluationReport, tuple[ModelVariant, ...]]


def present(world: World, seed: int = 0, rival: int | None = None) -> Presented:
    against = () if rival is None else (comparison(f"champion:{rival}", 0.004),)
    ref, report = world.register(seed, against=against)
    return ref, report, world.attach(ref)


def ask(
    world: World, what: Presented, now: datetime = NOON, config: PromotionConfig = ASKING
) -> PromotionDecision:
    return world.promote(*what, config, now)


def said(
    decision: Literal["approve", "reject"] = "approve", after: timedelta = HOUR, by: str = "Ana"
) -> Answer:
    return Answer(decision=decision, approver=by, comment="seen", given=NOON + after)


def answer(
    world: World, what: Answer, number: int = 1, *, overrule: bool = False
) -> PromotionDecision:
    seen = None if overrule else tags(world, number).get("approval_question")
    return answer_and_promote(NAME, number, what, world.location, world.store, seen)


def tags(world: World, number: int = 1) -> dict[str, str]:
    return dict(world.version(number).tags)


def state_of(decision: PromotionDecision) -> str | None:
    return None if decision.approval is None else decision.approval.state


def test_open_gates_are_not_enough_where_consent_is_required(world: World) -> None:
    decision = ask(world, present(world))

    assert all(gate.passed for gate in decision.gates)
    assert not decision.promoted
    assert state_of(decision) == "waiting"
    assert world.champion is None
    assert tags(world)["promotion"] == "all gates open, waiting"
    assert "waits for a person's approval until 2014-02-02 12:00 UTC" in outcome(decision)


def test_an_approval_moves_the_champion_and_is_recorded_in_decision_tags_and_file(
    world: World,
) -> None:
    ask(world, present(world))
    decision = answer(world, said())

    assert decision.promoted
    assert world.champion == 1
    assert (decision.approval.state, decision.approval.approver) == ("approved", "Ana")
    assert decision.approval.answered == NOON + HOUR
    seen = tags(world)
    assert (seen["approval"], seen["approver"], seen["approval_comment"]) == (
        "approved", "Ana", "seen",
    )  # fmt: skip
    assert seen["promotion"] == "all gates open, approved by Ana"
    folder = world.registry.run_folder(decision.candidate.run_id) / "promotion"
    kept = folder / f"{seen['promotion_sha256'][:12]}.json"
    assert PromotionDecision.model_validate_json(kept.read_text()) == decision


def test_a_rejected_version_is_not_asked_about_again_unless_asked_for(world: World) -> None:
    what = present(world)
    ask(world, what)
    decision = answer(world, said("reject"))
    assert (decision.promoted, state_of(decision)) == (False, "rejected")

    later = ask(world, what, NOON + 100 * HOUR)
    assert state_of(later) == "rejected"
    where = (NAME, 1, world.location, world.store, NOON + 100 * HOUR)
    assert not open_question(*where, again=False).is_open
    again = open_question(*where, again=True)
    assert again.is_open
    assert again.decision.approval.approver is None
    assert answer(world, said(after=101 * HOUR, by="Bo")).promoted
    assert tags(world)["approver"] == "Bo"


def test_the_champions_standing_names_the_version_that_a_person_is_asked_about(
    world: World,
) -> None:
    def asked_about(after: timedelta) -> int | None:
        return find_champion_state(NAME, world.location, NOON + after).asked_about

    ask(world, present(world), config=PromotionConfig())
    assert asked_about(HOUR) is None
    ask(world, present(world, seed=1, rival=1))
    assert asked_about(HOUR) == 2
    assert asked_about(25 * HOUR) is None  # its time is over, whoever notes that
    answer(world, said("reject"), number=2)
    assert asked_about(HOUR) is None


def test_no_answer_in_time_rejects_and_a_late_approval_changes_nothing(world: World) -> None:
    what = present(world)
    ask(world, what)
    decision = answer(world, said(after=24 * HOUR))
    assert (decision.promoted, state_of(decision)) == (False, "timed_out")
    assert world.champion is None
    assert state_of(ask(world, what, NOON + 30 * HOUR)) == "timed_out"
    assert "nobody answered before 2014-02-02 12:00 UTC" in outcome(decision)


def test_a_question_is_closed_only_when_its_time_is_over_and_nobody_answered(world: World) -> None:
    ask(world, present(world))
    digest = tags(world)["approval_question"]

    def close(after: timedelta, of: str = digest) -> bool:
        return close_question(NAME, 1, world.location, NOON + after, of)

    assert not close(23 * HOUR)
    assert not close(25 * HOUR, of="0" * 64)
    assert close(24 * HOUR)
    assert close(25 * HOUR)  # repeated after a kill
    reopen_question(NAME, 1, world.location, NOON + 25 * HOUR)
    answer(world, said(after=26 * HOUR))
    assert not close(80 * HOUR)
    assert world.champion == 1


def test_the_first_answer_stays_unless_somebody_overrules_it(world: World) -> None:
    ask(world, present(world))
    answer(world, said("reject", by="Ana"))
    assert state_of(answer(world, said(by="Bo"))) == "rejected"
    assert tags(world)["approver"] == "Ana"
    assert answer(world, said(after=50 * HOUR, by="Bo"), overrule=True).promoted
    assert tags(world)["approver"] == "Bo"


def test_an_approval_goes_through_the_gates_of_its_own_moment(world: World) -> None:
    first, second = present(world, 0), present(world, 1)
    ask(world, second)
    assert ask(world, first, config=PromotionConfig()).promoted  # a champion came meanwhile

    decision = answer(world, said(), number=2)

    assert [g.name for g in decision.gates if not g.passed] == ["champion"]
    assert (decision.promoted, state_of(decision)) == (False, "approved")
    assert world.champion == 1
    assert outcome(decision).endswith("version 2 was refused by gate champion")


@proves(Promise.VALIDATED, "other evidence is not approved")
def test_an_approval_counts_for_its_evidence_only(world: World) -> None:
    what = present(world)
    ask(world, what)
    stricter = ASKING.model_copy(update={"min_auc": 0.65})
    digest = tags(world)["approval_question"]
    assert state_of(ask(world, what, config=stricter)) == "waiting"
    with pytest.raises(RegistryError, match=r"another one .* was put"):
        answer_and_promote(NAME, 1, said(), world.location, world.store, digest)
    assert world.champion is None
    assert answer(world, said()).promoted


def test_a_closed_gate_asks_nobody(world: World) -> None:
    ref, report = world.register(0, auc=0.55)
    decision = ask(world, (ref, report, world.attach(ref)))
    assert decision.approval is None
    with pytest.raises(RegistryError, match="nobody was asked about"):
        answer(world, said())


def test_a_spoilt_question_is_no_approval(world: World) -> None:
    ask(world, present(world))
    (file,) = world.version(1).folder.parent.glob("promotion/question-*.json")
    file.write_text(file.read_text().replace('"min_auc": 0.6', '"min_auc": 0.5'))
    with pytest.raises(RegistryError, match="it was changed"):
        answer(world, said())
    file.write_text("{")
    with pytest.raises(RegistryError, match="cannot be read"):
        answer(world, said())
    shutil.rmtree(file.parent)
    with pytest.raises(RegistryError, match="cannot be read"):
        answer(world, said())
    assert world.champion is None


def test_tags_that_make_no_sense_are_no_approval(world: World) -> None:
    what = present(world)
    ask(world, what)
    registry = world.registry
    registry.set_tags(registry.version(NAME, 1), {"approval": "yes"})
    with pytest.raises(RegistryError, match="make no sense"):
        ask(world, what)
    assert world.champion is None


def test_the_question_shows_gates_and_pictures_and_no_text_of_the_data_as_markup(
    world: World,
) -> None:
    what = present(world)
    ask(world, what)
    folder = world.registry.run_folder(what[0].run_id) / "pictures"
    (folder / "earlier.png").write_bytes(b"picture")
    text = open_question(NAME, 1, world.location, world.store, NOON, again=False).markdown
    assert "![earlier](data:image/png;base64,cGljdHVyZQ==)" in text
    assert "![quality](data:image/svg+xml;base64,PHN2Zy" in text
    assert text.count("| open |") == len(ask(world, what).gates)
    assert "**No answer until 2014-02-02 12:00 UTC means no.**" in text
    assert "&#95;" in text  # such as in the suite's name


@given(st.text(max_size=5), st.text(max_size=5))
@example("\x1f", "")
@example("\x85\u2003", "")
def test_an_answer_needs_somebody_who_gives_it(approver: str, comment: str) -> None:
    fits = bool(approver.strip())
    try:
        made = Answer(decision="reject", approver=approver, comment=comment, given=NOON)
    except ValidationError:
        assert not fits
    else:
        assert fits
        assert made.approver == approver


def test_the_command_approves_through_the_gates_and_writes_the_audit(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(world, present(world))
    assert main(["models", "approve", NAME, "1", "--approver", "Ana", "--comment", "ok"]) == 0
    assert "version 1 is the champion, approved by Ana" in capsys.readouterr().out
    assert world.champion == 1
    trail = Journal(world.home / "audit")
    [line] = (line for line in trail.lines() if line.content["action"] == "answer-promotion")
    assert line.content["said"] == "approve"
    assert line.content["who"]["subject"] == "Ana"
    assert line.content["subject"] == {"model": NAME, "version": "version 1"}
    assert not verify(trail).faults


@pytest.fixture
def people(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """Version 1 waits, noor trained it, and people sign in."""
    ask(world, present(world))
    with held_registry(world.location) as registry:
        note_trainer(registry, world.version(1), "noor")
        note_trainer(registry, world.version(1), "another")  # the first one stays
    monkeypatch.setenv(TOKEN_FILE, str(world.home / "token"))
    with provider() as issuer:
        write_sign_in(world.home, issuer.issuer)
        yield issuer


def test_who_may_not_approve_vouches_for_no_model_and_administers_nothing(
    world: World, people: Provider
) -> None:
    (world.home / "token").write_text(people.token("viewer", sub="noor"))
    for line in (
        f"models sign {NAME} 1",
        "erase --entity a=b --yes",
        "audit begin because --yes",
        "encryption enable --keys file:///nowhere/keys",
    ):
        assert main(line.split()) == 2
    assert len(acts(world.home, "refuse")) == 4


def test_who_trained_cannot_approve_and_another_can(world: World, people: Provider) -> None:
    token = world.home / "token"
    for sub, role, code in (("noor", "approver", 2), ("ali", "viewer", 2), ("ali", "approver", 0)):
        token.write_text(people.token(role, sub=sub))
        assert (main(["models", "approve", NAME, "1", "--approver", "Ana"]), world.champion) == (
            2,
            None,
        )
        assert main(["models", "approve", NAME, "1"]) == code
    assert tags(world)["approver"] == "ali"


def test_who_trained_is_who_started_the_run_or_the_controller(
    prefect_api: PrefectApi, world: World, people: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect keeps the authorizer's headers; an automation of the same name is no person."""
    monkeypatch.setenv("FALAJ_HOME", str(world.home))
    (world.home / "token").write_text(people.token("operator", sub="ana"))
    of_omar = creator_headers("omar")
    of_automation = of_omar | {"prefect-automation-id": str(uuid4())}
    user, _, password = str(prefect_api.auth_string).partition(":")
    known = {"base_url": f"{prefect_api.url}/", "auth": (user, password)}
    with prefect_api.in_process(), httpx.Client(**known) as client:  # type: ignore[arg-type]
        flow = client.post("flows/", json={"name": "pipeline"}).json()["id"]
        described = {"name": "pipeline", "flow_id": flow}
        deployment = client.post("deployments/", json=described).json()["id"]
        start = f"deployments/{deployment}/create_flow_run"
        for path, headers, who in (
            (start, of_omar, "omar"),
            (start, of_automation, CONTROLLER),
            (start, {}, CONTROLLER),
            ("flow_runs/", {}, "ana"),  # a command's own process
        ):
            asked = {"flow_id": flow} if path == "flow_runs/" else {}
            run = client.post(path, json=asked, headers=headers).json()["id"]
            monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ROOT_FLOW_RUN_ID", run)
            assert _trainer() == who


def test_an_admin_breaks_the_glass_to_approve(world: World, people: Provider) -> None:
    (world.home / "token").write_text(people.token("admin", sub="noor"))
    assert main(["models", "approve", NAME, "1"]) == 2
    assert main(["models", "approve", NAME, "1", "--break-glass", "the site is down"]) == 0
    actions = [line.content["action"] for line in Journal(world.home / "audit").lines()]
    wanted = ["refuse", "break-glass", "answer-promotion"]
    assert [action for action in actions if action in wanted] == wanted


def test_an_answer_in_the_ui_counts_under_the_name_that_the_door_wrote(
    world: World, people: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "run-1")
    journal, settings = Journal(world.home / "audit"), Settings(world.home, world.home)
    ref = world.version(1).ref

    def given(by: str, run: str = "run-1", said: str = "approve") -> None:
        journal.append("approve", flow_run=run, said=said, who={"subject": by})

    def answered() -> str:
        typed = Answer(decision="approve", approver="typed", given=datetime.now(UTC))
        return signed_in_answer(typed, ref, settings).approver

    given("noor", run="another-run")
    given("noor", said="reject")
    with pytest.raises(AccessError, match="past the gateway"):
        answered()
    given("noor")
    with pytest.raises(AccessError, match="noor trained it"):
        answered()
    given("ali")
    assert answered() == "ali"
