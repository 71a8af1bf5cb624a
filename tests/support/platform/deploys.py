"""Deploying to a real server from tests: plans of a part of the file, and drift results."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.events import Event, get_events_client

from infra.deploying.deploy import Plan, deploy, make_plan
from infra.deploying.file import PREFECT_FILE
from infra.deploying.items import Outcome
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

Result = TypeVar("Result")
REPO = str(PROJECT_ROOT / DEFAULT_FEATURE_REPO)


def on_server(work: Callable[[PrefectClient], Awaitable[Result]]) -> Result:
    """Do something with a client; everything that it finds is read anew."""

    async def do() -> Result:
        async with get_client() as client:
            return await work(client)

    return asyncio.run(do())


def redeploy(planned: Plan, **options: Any) -> Outcome:
    """Deploy; the server must have taken all."""
    outcome = on_server(lambda client: deploy(client, planned, **options))
    assert outcome.differences == []
    return outcome


def part_of_the_file(*flows: str) -> str:
    """The file with the deployments of some flows alone."""
    content = yaml.safe_load(PREFECT_FILE.read_text())
    entries = [d for d in content["deployments"] if d["entrypoint"].split(".")[1] in flows]
    return yaml.safe_dump({**content, "definitions": {}, "deployments": entries})


def plan_of(text: str, folder: Path, repos: Sequence[str] = (REPO,), **options: Any) -> Plan:
    """A plan of a changed prefect.yaml."""
    file = folder / "prefect.yaml"
    file.write_text(text)
    return make_plan(list(repos), file=file, **options)


def send(events: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    """Events - name, resource, payload - through the socket that flows use."""

    async def do() -> None:
        async with get_events_client(checkpoint_every=100) as client:
            for name, resource, payload in events:
                labels = {"prefect.resource.id": resource, "falaj.verdict": "none"}
                await client.emit(Event(event=name, resource=labels, payload=payload))

    asyncio.run(do())
