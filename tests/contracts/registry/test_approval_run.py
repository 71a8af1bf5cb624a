"""The run that asks a person: on a real Prefect server, with a real worker and a real browser."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.states import Scheduled
from prefect.utilities.callables import parameter_schema

from falaj.__main__ import main
from flows.promotion import APPROVAL, EXPIRY, approval_expiry_flow, approval_flow, start_approval
from tasks.contracts.release import PromotionDecision
from tasks.governance.journal import Journal
from tasks.registry.config import ApprovalConfig, PromotionConfig
from tests.support.host.processes import wait_until
from tests.support.platform.deployed import deploy
from tests.support.registry.builders import CONFIG, World, comparison
from tests.support.services.browser import Page, browser, needs_browser
from tests.support.services.prefect_platform import PrefectApi, shown

pytestmark = pytest.mark.slow

POOL = "approval-tests"
NAME = CONFIG.model_name
LIMIT_S = 240


@dataclass(frozen=True)
class Office:
    """An installation whose worker runs the flows that ask, with candidates to ask about."""

    world: World
    home: Path

    def candidate(self, seed: int, timeout_h: float = 24) -> PromotionDecision:
        """Register the model of one seed and promote it as far as the question."""
        reigning = self.world.champion
        against = (comparison(f"champion:{reigning}", 0.004),) if reigning else ()
        config = PromotionConfig(approval=ApprovalConfig(enabled=True, timeout_h=timeout_h))
        return self.world.promoted(seed, against, config, datetime.now(UTC))

    def state_of(self, version: int) -> str:
        return self.world.version(version).tags["approval"]

    def audit(self, version: int) -> list[tuple[str, str | None]]:
        """What was said about a version, and by whom."""
        lines = (line.content for line in Journal(self.home / "audit").lines())
        return [
            (str(act.get("said", act["outcome"])), act["who"].get("subject"))
            for act in lines
            if act.get("subject", {}).get("version") == f"version {version}"
        ]


@pytest.fixture(scope="module")
def office(prefect_api: PrefectApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    home = tmp_path_factory.mktemp("office")
    world = World.at(home)
    with pytest.MonkeyPatch.context() as patch, prefect_api.in_process():
        patch.setenv("FALAJ_HOME", str(home))
        with get_client(sync_client=True) as client:
            made = [
                deploy(
                    client,
                    of,
                    name.split("/")[1],
                    POOL,
                    parameter_openapi_schema=parameter_schema(of).model_dump(),
                    enforce_parameter_schema=True,
                )
                for of, name in ((approval_flow, APPROVAL), (approval_expiry_flow, EXPIRY))
            ]
            with prefect_api.worker(POOL, FALAJ_HOME=str(home)):
                yield Office(world, home)
            for deployment in made:  # other tests may want these names
                client.delete_deployment(deployment)


@flow(name="promotion-under-test")
def promoting(decision: PromotionDecision) -> None:
    start_approval(decision)


def runs_about(version: int, of: str = "approval") -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[of])), flow_run_filter=FlowRunFilter()
        )
    return [run for run in runs if run.parameters["version"] == version]


def wait_for(version: int, *states: StateType, of: str = "approval") -> FlowRun:
    """Poll until the one run about a version is in one of these states."""

    def found() -> FlowRun | None:
        runs = runs_about(version, of)
        assert len(runs) <= 1, runs
        return next((run for run in runs if run.state and run.state.type in states), None)

    return wait_until(found, f"{of} of version {version} to be in {states}", LIMIT_S, 0.5)


def resume(run: FlowRun, told: dict[str, str] | None) -> str:
    with get_client(sync_client=True) as client:
        return str(client.resume_flow_run(run.id, run_input=told).status.value)


@needs_browser
@pytest.mark.timeout(600)
def test_a_person_approves_in_the_ui_and_finished_tasks_are_not_run_again(
    office: Office, prefect_api: PrefectApi, tmp_path: Path
) -> None:
    decision = office.candidate(1)
    number = decision.candidate.version
    promoting(decision)
    promoting(decision)  # a promotion that is retried asks once
    waiting = wait_for(number, StateType.PAUSED)
    expiry = wait_for(number, StateType.SCHEDULED, of="approval-expiry")
    assert expiry.expected_start_time == decision.approval.deadline

    for wrong in (
        None,
        {},
        {"decision": "approve"},
        {"decision": "perhaps", "approver": "Ana"},
        {"decision": "approve", "approver": ""},
        {"decision": "approve", "approver": " "},
        {"decision": "approve", "approver": "Ana", "signed": "yes"},
    ):
        assert resume(waiting, wrong) == "REJECT", wrong
    assert office.world.champion is None

    with browser(tmp_path) as page:
        log_in(page, prefect_api)
        run_url = f"{prefect_api.url.removesuffix('/api')}/runs/flow-run/{waiting.id}"
        answer_in_the_first_ui(page, run_url)
    done = completed(number)
    assert office.world.champion == number
    assert office.state_of(number) == "approved"
    assert office.audit(number) == [("approve", "Ana Lytic")]
    assert len(shown("approval-question", done.id)) == 1
    assert len(shown("promotion-gates", done.id)) == 1
    cancelled = wait_for(number, StateType.CANCELLED, of="approval-expiry")
    assert cancelled.run_count == 0
    assert len(events_named("falaj.promotion.waiting", number)) == 1


def completed(number: int) -> FlowRun:
    """The run about a version, which ended well."""
    done = wait_for(number, StateType.COMPLETED, StateType.FAILED, StateType.CRASHED)
    assert done.state.is_completed(), done.state.message
    return done


def log_in(page: Page, api: PrefectApi) -> None:
    """As the login page does it: the password goes into the browser's local storage."""
    word = base64.b64encode(api.auth_string.encode()).decode()
    page.run_before_each_page(f"localStorage.setItem('prefect-password', '{word}')")


PICTURE = "document.querySelector('[role=dialog] img, .p-modal img')"
EXPLAINED = ("become the champion?", "Decision", "it becomes the champion if all gates", "Approver",
             "Your name, as it is to be recorded", "Comment")  # fmt: skip


def answer_in_the_first_ui(page: Page, run_url: str) -> None:
    page.open(run_url)
    page.click("Resume")
    page.wait_for_text(*EXPLAINED)
    assert page.wait(f"{PICTURE}?.naturalWidth", "the picture") > 100
    choices = page.value("[...document.querySelectorAll('.p-modal option')].map(o => o.value)")
    assert choices == ["approve", "reject"]
    chosen = "document.querySelector('.p-modal option[value=approve]').parentElement"
    assert page.value(f"{chosen}.value") == ""  # nothing is chosen for the person
    page.value(f"{chosen}.value = 'approve', {chosen}.dispatchEvent(new Event('change'))")
    page.type_into("document.querySelectorAll('.p-modal textarea')[0]", "Ana Lytic")
    page.type_into("document.querySelectorAll('.p-modal textarea')[1]", "better in every slice")
    page.click("Submit")
    page.wait_for_text("Flow run resumed")


def events_named(name: str, version: int) -> list[dict[str, Any]]:
    """Payloads of the events of one kind about a version; they are stored a little later."""
    wanted = EventFilter(
        event=EventNameFilter(name=[name]), resource=EventResourceFilter(id=[f"falaj.model.{NAME}"])
    )
    # Not `read_events`: it sends what is unset as null, which the server refuses.
    told = {"filter": wanted.model_dump(mode="json", exclude_none=True), "limit": 50}
    with get_client(sync_client=True) as client:

        def found() -> list[dict[str, Any]]:
            events = client.request("POST", "/events/filter", json=told).json()["events"]
            return [e["payload"] for e in events if e["payload"]["version"] == version]

        return wait_until(found, f"{name} of version {version}", LIMIT_S, 0.5)


@pytest.mark.timeout(600)
def test_no_answer_in_time_is_recorded_as_a_rejection_and_not_as_a_failure(office: Office) -> None:
    decision = office.candidate(2, timeout_h=40 / 3600)
    number, before = decision.candidate.version, office.world.champion
    promoting(decision)
    done = completed(number)
    assert office.state_of(number) == "timed_out"
    assert office.world.champion == before
    assert office.audit(number) == [("timed out", None)]
    promoting(office.candidate(2))  # the same version is promoted again, later
    assert [run.id for run in runs_about(number)] == [done.id]


@pytest.mark.timeout(600)
def test_a_run_that_is_suspended_late_is_let_go_on_by_the_end_of_its_question(
    office: Office,
) -> None:
    decision = office.candidate(6, timeout_h=12 / 3600)
    number = decision.candidate.version
    promoting(decision)
    wait_for(number, StateType.RUNNING, StateType.PAUSED)
    assert main(["models", "reject", NAME, str(number), "--approver", "Bo"]) == 0
    completed(number)
    assert office.state_of(number) == "rejected"


@pytest.mark.timeout(600)
def test_a_run_that_is_forced_to_go_on_without_an_answer_approves_nothing(office: Office) -> None:
    decision = office.candidate(3)
    number, before = decision.candidate.version, office.world.champion
    promoting(decision)
    waiting = wait_for(number, StateType.PAUSED)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(waiting.id, Scheduled(), force=True)
    failed = wait_for(number, StateType.COMPLETED, StateType.FAILED, StateType.CRASHED)
    assert failed.state.is_failed()
    assert "without an answer about flight-delay" in str(failed.state.message)
    assert office.world.champion == before
    assert office.state_of(number) == "waiting"  # and can still be answered


@pytest.mark.timeout(600)
def test_an_answer_on_the_command_line_lets_the_run_that_asks_go_on(
    office: Office, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = office.candidate(4)
    number, before = decision.candidate.version, office.world.champion
    promoting(decision)
    wait_for(number, StateType.PAUSED)
    assert main(["models", "reject", NAME, str(number), "--approver", "Bo", "--comment", "no"]) == 0
    assert "the run that asked resumes" in capsys.readouterr().out
    completed(number)
    assert office.world.champion == before
    assert office.audit(number) == [("reject", "Bo")]
    (told,) = events_named("falaj.promotion.rejected", number)
    assert (told["approver"], told["comment"]) == ("Bo", "no")
