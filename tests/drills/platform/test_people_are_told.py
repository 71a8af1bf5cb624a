"""People are told: real trouble on a real platform, by webhook, as Slack takes it, and by mail.

A run really fails on a real worker; its message arrives on every channel and says what to do next.
The addresses hold secrets; afterwards no log, event or page of the API has one.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import PrefectClient, get_client

from tests.support.host.processes import wait_until
from tests.support.platform.deployed import deploy
from tests.support.platform.deploys import on_server, part_of_the_file, plan_of, redeploy
from tests.support.services.listeners import mail_listener, webhook_listener
from tests.support.services.prefect_platform import PrefectApi, prefect_api_server
from tests.support.suite.promises import Promise, proves

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(0),
    # Apprise, which Prefect's block for mail uses.
    pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning"),
]
SECRETS = ("webhook-secret-1", "T0/B0/slack-secret-2", "mail-secret-3")
LIMIT_S = 240
POOL = "told"


@dataclass(frozen=True)
class Channels:
    """What has arrived, on each of the three channels."""

    webhook: list[dict[str, Any]]
    slack: list[dict[str, Any]]
    mail: list[Message]

    @property
    def texts(self) -> dict[str, list[str]]:
        """Every message as one text, its subject first, by channel."""
        return {
            "webhook": [f"{said['subject']}\n{said['body']}" for said in self.webhook],
            "slack": [said["text"] for said in self.slack],
            "mail": [" ".join(f"{m['Subject']}\n{_plain_part(m)}".split()) for m in self.mail],
        }

    def wait_for(self, *words: str, limit_s: float = LIMIT_S) -> dict[str, str]:
        """The message with all these words, on every channel."""

        def found() -> dict[str, str]:
            return {
                name: text
                for name, texts in self.texts.items()
                for text in texts
                if all(word in text for word in words)
            }

        wait_until(lambda: len(found()) == 3, f"{words} in {self.texts}", limit_s=limit_s)
        return found()


def _plain_part(mail: Message) -> str:
    parts = [part for part in mail.walk() if part.get_content_maintype() == "text"]
    payload = parts[0].get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectApi]:
    with prefect_api_server(tmp_path_factory.mktemp("telling")) as server, server.in_process():
        yield server


@pytest.fixture(scope="module")
def channels(api: PrefectApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Channels]:
    """All three, deployed from secret addresses as a person gives them."""
    webhook_path, slack_path, word = SECRETS
    with ExitStack() as open_until_the_end:
        enter = open_until_the_end.enter_context
        webhook, posted = enter(webhook_listener(webhook_path))
        slack, said = enter(webhook_listener(f"services/{slack_path}"))
        port, mails = enter(mail_listener())
        patch = enter(pytest.MonkeyPatch.context())
        patch.setenv("FALAJ_NOTIFY_WEBHOOK", webhook)
        patch.setenv("FALAJ_NOTIFY_SLACK", slack)
        sent = f"?from=falaj@example.org&to=team@example.org&mode=insecure&name={word}"
        patch.setenv("FALAJ_NOTIFY_EMAIL", f"mailto://127.0.0.1:{port}{sent}")
        folder = tmp_path_factory.mktemp("file")
        redeploy(plan_of(part_of_the_file("feature_refresh", "decision"), folder))
        yield Channels(posted, said, mails)


@flow(name="failing-for-real", flow_run_name="refresh-delays-20131201")
def failing_flow() -> None:
    """Fail as a broken feed does."""
    raise ValueError("column dep_time has 312 nulls; expected none. Nothing was published")


@proves(Promise.TOLD, "mail, Slack and webhook say what to do")
def test_real_trouble_reaches_every_channel_with_what_to_do_next(
    api: PrefectApi, channels: Channels
) -> None:
    with get_client(sync_client=True) as client:
        deployment = deploy(client, failing_flow, "cpu", POOL)
        with api.worker(POOL):
            client.create_flow_run_from_deployment(deployment)
            failed = channels.wait_for("failing-for-real run", "312 nulls")
    assert all("What to do next" in text for text in failed.values())


@proves(Promise.TOLD, "no secret in a log, event or page")
def test_no_log_event_or_page_has_a_secret_of_an_address(
    api: PrefectApi, channels: Channels
) -> None:
    async def shown(client: PrefectClient) -> str:
        pages = []
        for path in ("/block_documents/filter", "/automations/filter", "/logs/filter"):
            answer = await client._client.post(path, json={"limit": 200})
            pages.append(json.dumps(answer.json()))
        events = await client._client.post("/events/filter", json={"limit": 50})
        return "".join([*pages, json.dumps(events.json())])

    places = {"the API": on_server(shown)}
    for log in Path(api.home).glob("*.log"):
        places[log.name] = log.read_text(errors="replace")
    assert places["the API"]
    for place, text in places.items():
        for secret in SECRETS:
            assert secret not in text, f"{place} shows {secret}"
