"""What people are told: each message as a real server renders it and a real receiver gets it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.events.actions import RunDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.server.utilities.user_templates import validate_user_template

from flows.feature_refresh import announce_staleness
from flows.promotion import announce_refusal
from infra.deploying.automations import notifications, notify
from infra.orchestration.embedded import send_what_is_left
from tests.support.host.processes import wait_until
from tests.support.platform.deploys import on_server
from tests.support.release.builders import WORSE, refused
from tests.support.services.listeners import webhook_listener
from tests.support.services.prefect_platform import PrefectApi

LIMIT_S = 120
MODEL = {"prefect.resource.id": "falaj.model.delay", "prefect.resource.name": "delay"}


@dataclass
class Inbox:
    """What arrived, each message with the name of its notification."""

    messages: list[dict[str, Any]]

    def of(self, name: str) -> list[str]:
        return [f"{m['subject']}\n{m['body']}" for m in self.messages if m["name"] == name]

    def wait(self, name: str, words: str) -> str:
        """The message with these words, subject first; polls until it is there."""

        def found() -> list[str]:
            return [text for text in self.of(name) if words in text]

        wait_until(found, f"{name} {words}: {self.messages}", LIMIT_S)
        return found()[0]


@pytest.fixture(scope="module")
def inbox(prefect_api: PrefectApi) -> Iterator[Inbox]:
    """All notifications as automations of a real server; their messages arrive here."""
    with (
        prefect_api.in_process(),
        webhook_listener() as (address, messages),
        get_client(sync_client=True) as client,
    ):
        made = []
        for each in notifications():
            block = CustomWebhookNotificationBlock(
                name=each.name,
                url=address,
                json_data={"name": each.name, "subject": "{{subject}}", "body": "{{body}}"},
            )
            number = block.save(f"{each.name}-under-test", overwrite=True)
            item = notify(each)
            sent = SendNotification(block_document_id=number, subject=each.subject, body=each.body)

            async def actions(_: object, sent: SendNotification = sent) -> list[SendNotification]:
                return [sent]

            item = replace(item, name=f"{item.name}-under-test", actions=actions)
            on_server(item.write)
            [there] = client.read_automations_by_name(item.name)
            made.append(there.id)
        yield Inbox(messages)
        for automation_id in made:
            client.delete_automation(automation_id)


def emit(event: str, resource: dict[str, str], payload: dict[str, Any]) -> None:
    emit_event(event, resource=resource, payload=payload)
    send_what_is_left()


def test_every_notification_is_a_template_and_says_what_to_do_next() -> None:
    assert len({n.name for n in notifications()}) == len(notifications())
    for each in notifications():
        validate_user_template(each.subject)
        validate_user_template(each.body)
        assert "\n" not in each.subject
        assert "What to do next:\n" in each.body


def test_a_failed_run_is_told_with_its_reason_and_its_page(inbox: Inbox) -> None:
    @flow(name="failing-under-test", flow_run_name="train-delay-20130101")
    def failing() -> None:
        raise ValueError("column dep_time has 312 nulls; expected none")

    with pytest.raises(ValueError, match="312 nulls"):
        failing()
    send_what_is_left()
    text = inbox.wait("failed-run", "train-delay-20130101")
    for words in ("column dep_time has 312 nulls", "Run: train-delay", "falaj retry"):
        assert words in text


@pytest.mark.slow
def test_refusals_and_stale_features_are_told_gate_by_gate_and_view_by_view(inbox: Inbox) -> None:
    @flow(name="telling-under-test", flow_run_name="promote-delay-v3")
    def telling() -> None:
        announce_refusal(refused())
        announce_staleness("delays", ("weather is 31 h old", "planes is 40 h old"))
        announce_staleness("fresh", ())

    telling()
    send_what_is_left()
    text = inbox.wait("promotion-refused", "version 3")
    assert f"- champion: {WORSE}" in text
    assert "auc-floor" not in text
    assert "Version 2 stays the champion." in text
    text = inbox.wait("stale-features", "features of delays are stale")
    assert "- weather is 31 h old\n- planes is 40 h old\n" in text
    assert len(inbox.of("stale-features")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "name", "more", "words"),
    [
        ("falaj.promotion.rejected", "promotion-rejected", {"approver": "Ana"}, "rejected by Ana"),
        ("falaj.promotion.rejected", "promotion-rejected", {}, "nobody answered in time"),
        ("falaj.promotion.waiting", "approval-waiting", {}, "by itself at 2026-11-24 12:00 UTC"),
        ("prefect.work-pool.not-ready", "worker-offline", {}, "no worker serves work pool delay"),
    ],
)
def test_what_became_of_a_candidate_or_of_a_worker_is_told(
    inbox: Inbox, event: str, name: str, more: dict[str, str], words: str
) -> None:
    payload = {
        "model": "delay", "version": 4, "approver": None, "comment": "too slow on EV",
        "reason": "rejected", "champion": None, "summary": "11 of 11 gates are open.",
        "deadline": "2026-11-24 12:00 UTC", **more,
    }  # fmt: skip
    resource = MODEL
    if name == "worker-offline":
        resource = {**MODEL, "prefect.resource.id": f"prefect.work-pool.{uuid4()}",
                    "prefect.work-pool.type": "process"}  # fmt: skip
    emit(event, resource, payload)
    inbox.wait(name, words)


@pytest.mark.slow
def test_drift_is_told_where_it_asks_for_something_and_not_where_it_does_not(inbox: Inbox) -> None:
    for result in ("stable", "watch", "retrain", "data_fault"):
        name = result.replace("_", "-")
        labels = {"prefect.resource.id": f"falaj.model.{name}", "falaj.verdict": result}
        payload = {"model": name, "use_case": "delays", "verdict": result,
                   "window": "2013-12", "verdict_id": "v1"}  # fmt: skip
        emit("falaj.drift.judged", labels, payload)
    retrain = inbox.wait("drift", "retrain: drift in 2013-12 asks for a retraining")
    fault = inbox.wait("drift", "data-fault: the data of 2013-12 are faulty")
    assert "Nothing, as a rule" in retrain
    assert "Nothing, as a rule" not in fault
    assert len(inbox.of("drift")) == 2


@pytest.mark.slow
def test_a_failed_action_is_told_but_never_that_of_a_message(inbox: Inbox) -> None:
    """A message that cannot be sent must not cause one that cannot be sent, for ever."""
    event = f"falaj.test.{uuid4()}"
    trigger = EventTrigger(
        expect={event}, posture=Posture.Reactive, threshold=1, within=timedelta(0)
    )
    act = RunDeployment(deployment_id=uuid4(), source="selected")
    names = ("notify-broken-under-test", "decide-under-test")
    with get_client(sync_client=True) as client:
        made = [
            client.create_automation(AutomationCore(name=name, trigger=trigger, actions=[act]))
            for name in names
        ]
        emit(event, {"prefect.resource.id": "falaj.test"}, {})
        text = inbox.wait("failed-action", "automation decide-under-test could not act")
        for number in made:
            client.delete_automation(number)
    assert "Its action run-deployment failed:" in text
    assert len(inbox.of("failed-action")) == 1
