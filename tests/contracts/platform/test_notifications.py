"""What people are told: each message as a real server renders it and a real receiver gets it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID, uuid4

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
from infra.deploying.automations import Notification, notification, notifications
from infra.orchestration.embedded import send_what_is_left
from tests.support.release.builders import WORSE, refused
from tests.support.services.prefect_platform import PrefectApi

LIMIT_S = 120
MODEL = {"prefect.resource.id": "falaj.model.delay", "prefect.resource.name": "delay"}


@dataclass
class Inbox:
    """What arrived, by the name of the notification."""

    port: int
    messages: list[tuple[str, str, str]] = field(default_factory=list)

    def wait(self, notification: Notification, *words: str) -> str:
        """The message with all these words, subject first; polls until it is there."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for name, subject, body in list(self.messages):
                text = f"{subject}\n{body}"
                if name == notification.name and all(word in text for word in words):
                    return text
            assert time.monotonic() < deadline, f"{notification.name} {words}: {self.messages}"
            time.sleep(0.2)

    def count(self, notification: Notification) -> int:
        return sum(name == notification.name for name, _, _ in self.messages)


@contextmanager
def receiver() -> Iterator[Inbox]:
    """An HTTP server on loopback that keeps what it is sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["content-length"])))
            inbox.messages.append((self.path.strip("/"), said["subject"], said["body"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        inbox = Inbox(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield inbox
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def inbox(prefect_api: PrefectApi) -> Iterator[Inbox]:
    """All notifications as automations of a real server; their messages arrive here."""
    with prefect_api.in_process(), receiver() as box, get_client(sync_client=True) as client:
        made = []
        for each in notifications():
            block = CustomWebhookNotificationBlock(
                name=each.name,
                url=f"http://127.0.0.1:{box.port}/{each.name}",
                json_data={"subject": "{{subject}}", "body": "{{body}}"},
            )
            number = block.save(f"{each.name}-under-test", overwrite=True)
            assert isinstance(number, UUID)
            made.append(client.create_automation(automation(each, number)))
        yield box
        for automation_id in made:
            client.delete_automation(automation_id)


def automation(notification: Notification, block: UUID) -> AutomationCore:
    match = {k: list(v) if isinstance(v, tuple) else v for k, v in notification.match.items()}
    return AutomationCore(
        name=f"{notification.automation_name}-under-test",
        trigger=EventTrigger(
            expect=set(notification.expect),
            match=match,
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(seconds=notification.quiet_s),
        ),
        actions=[
            SendNotification(
                block_document_id=block, subject=notification.subject, body=notification.body
            )
        ],
    )


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
        assert each.automation_name == f"notify-{each.name}"


def test_a_failed_run_is_told_with_its_reason_and_its_page(inbox: Inbox) -> None:
    @flow(name="failing-under-test", flow_run_name="train-delay-20130101")
    def failing() -> None:
        raise ValueError("column dep_time has 312 nulls; expected none")

    with pytest.raises(ValueError, match="312 nulls"):
        failing()
    send_what_is_left()
    text = inbox.wait(notification("failed-run"), "train-delay-20130101")
    assert text.startswith("Falaj: failing-under-test run train-delay-20130101 failed\n")
    assert "column dep_time has 312 nulls" in text
    assert "Run: train-delay-20130101" in text
    assert "python -m falaj retry" in text


@pytest.mark.slow
def test_a_refused_promotion_is_told_gate_by_gate(inbox: Inbox) -> None:
    @flow(name="refusing-under-test", flow_run_name="promote-delay-v3")
    def refusing() -> None:
        announce_refusal(refused())

    refusing()
    send_what_is_left()
    text = inbox.wait(notification("promotion-refused"), "version 3")
    assert text.startswith("Falaj: delay version 3 was refused by 1 gate(s)\n")
    assert f"- champion: {WORSE}" in text
    assert "auc-floor" not in text
    assert "Version 2 stays the champion." in text
    assert "Run: promote-delay-v3" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("approver", "told"), [("Ana", "was rejected by Ana"), (None, "nobody answered in time")]
)
def test_a_rejected_promotion_is_told(inbox: Inbox, approver: str | None, told: str) -> None:
    payload = {
        "model": "delay", "version": 4, "approver": approver, "comment": "too slow on EV",
        "reason": "rejected", "champion": None,
    }  # fmt: skip
    emit("falaj.promotion.rejected", MODEL, payload)
    text = inbox.wait(notification("promotion-rejected"), told)
    assert "There is no champion." in text
    assert "python -m falaj models approve delay 4 --approver NAME" in text


@pytest.mark.slow
def test_a_candidate_that_waits_is_told_with_its_deadline(inbox: Inbox) -> None:
    payload = {"model": "delay", "version": 5, "summary": "11 of 11 gates are open.",
               "deadline": "2026-11-24 12:00 UTC"}  # fmt: skip
    emit("falaj.promotion.waiting", MODEL, payload)
    text = inbox.wait(notification("approval-waiting"), "version 5 waits for your approval")
    assert "It is rejected by itself at 2026-11-24 12:00 UTC." in text


@pytest.mark.slow
def test_drift_is_told_where_it_asks_for_something_and_not_where_it_does_not(inbox: Inbox) -> None:
    for result in ("stable", "watch", "retrain", "data_fault"):
        name = result.replace("_", "-")
        labels = {"prefect.resource.id": f"falaj.model.{name}", "falaj.verdict": result}
        payload = {"model": name, "use_case": "delays", "verdict": result,
                   "window": "2013-12", "verdict_id": "v1"}  # fmt: skip
        emit("falaj.drift.judged", labels, payload)
    retrain = inbox.wait(notification("drift"), "retrain: drift in 2013-12 asks for a retraining")
    assert "Nothing, as a rule" in retrain
    fault = inbox.wait(notification("drift"), "data-fault: the data of 2013-12 are faulty")
    assert "Mend the feed" in fault
    assert "Nothing, as a rule" not in fault
    assert inbox.count(notification("drift")) == 2


@pytest.mark.slow
def test_stale_features_are_told_view_by_view(inbox: Inbox) -> None:
    @flow(name="stale-under-test", flow_run_name="refresh-delays-20131201")
    def stale() -> None:
        announce_staleness("delays", ("weather is 31 h old", "planes is 40 h old"))
        announce_staleness("fresh", ())

    stale()
    send_what_is_left()
    text = inbox.wait(notification("stale-features"), "features of delays are stale")
    assert "- weather is 31 h old\n- planes is 40 h old\n" in text
    assert inbox.count(notification("stale-features")) == 1


@pytest.mark.slow
def test_a_work_pool_without_a_worker_is_told(inbox: Inbox) -> None:
    labels = {
        "prefect.resource.id": f"prefect.work-pool.{uuid4()}",
        "prefect.resource.name": "gpu",
        "prefect.work-pool.type": "process",
    }
    emit("prefect.work-pool.not-ready", labels, {})
    assert "no worker serves work pool gpu" in inbox.wait(notification("worker-offline"), "gpu")


@pytest.mark.slow
def test_a_failed_action_is_told_but_never_that_of_a_message(inbox: Inbox) -> None:
    """A message that cannot be sent must not cause one that cannot be sent, for ever."""
    event = f"falaj.test.{uuid4()}"
    trigger = EventTrigger(
        expect={event}, posture=Posture.Reactive, threshold=1, within=timedelta(0)
    )
    act = RunDeployment(deployment_id=uuid4(), source="selected")
    silent = AutomationCore(name="notify-broken-under-test", trigger=trigger, actions=[act])
    told = AutomationCore(name="decide-under-test", trigger=trigger, actions=[act])
    with get_client(sync_client=True) as client:
        made = [client.create_automation(core) for core in (silent, told)]
        emit(event, {"prefect.resource.id": "falaj.test"}, {})
        text = inbox.wait(
            notification("failed-action"), "automation decide-under-test could not act"
        )
        for number in made:
            client.delete_automation(number)
    assert "Its action run-deployment failed:" in text
    assert inbox.count(notification("failed-action")) == 1
