"""What a running Envoy takes without a restart: models, certificates, and no second Envoy."""

import json
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml

from falaj.__main__ import main
from tasks.kernel.files import write_atomically
from tests.support.host.processes import pids_whose_command_holds, run_falaj, wait_until
from tests.support.services.listeners import tls_connection
from tests.support.serving.edges import INFER, Edge


def change(edge: Edge, **settings: Any) -> None:
    file = edge.plan.files.config_file
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(content | settings))
    assert main(["--home", str(edge.home), "gateway", "prepare"]) == 0


def names_in_certificate(edge: Edge) -> set[str]:
    context = ssl.create_default_context(cafile=str(edge.authority))
    with tls_connection(edge.port, context) as secure:
        found = secure.getpeercert() or {}
    return {str(value) for _, value in found["subjectAltName"]}  # type: ignore[misc]


def test_a_model_that_was_added_is_let_through(edge: Edge, client: httpx.Client) -> None:
    path = INFER.replace("flight-delay", "added")
    headers = edge.bearer("add", "infer:added")
    assert client.post(path, json={}, headers=headers).status_code == 404
    running = edge.process
    models = yaml.safe_load(edge.plan.files.config_file.read_text())["models"]
    change(edge, models=models | {"added": {}})
    wait_until(
        lambda: client.post(path, json={}, headers=headers).status_code == 200,
        "Envoy took the model",
    )
    assert client.post(path, json={}, headers=edge.bearer("add")).status_code == 403
    assert edge.process is running
    assert running.poll() is None


def test_a_renewed_certificate_is_shown_to_new_clients(edge: Edge) -> None:
    assert "renewed.test" not in names_in_certificate(edge)
    change(edge, hosts=["localhost", "127.0.0.1", "renewed.test"])
    wait_until(lambda: "renewed.test" in names_in_certificate(edge), "Envoy took the certificate")


def test_what_envoy_refuses_is_told_and_the_old_goes_on(
    edge: Edge, client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    file = edge.plan.files.resource("listeners")
    content = json.loads(file.read_text())
    manager = content["resources"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["stat_prefix"] = ""
    write_atomically(file, json.dumps(content))
    wait_until(edge.admin.refusals, "Envoy refused it")
    assert main(["--home", str(edge.home), "gateway", "status"]) == 1
    assert "StatPrefix" in capsys.readouterr().out
    assert client.post(INFER, json={}, headers=edge.bearer("goes-on")).status_code == 200
    edge.traffic.set_shares("flight-delay", 0.5, 0)
    change(edge)
    wait_until(lambda: not edge.admin.refusals(), "Envoy took what is right again")


def listens(edge: Edge) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", edge.port)) == 0


def test_told_to_end_it_answers_what_it_has_begun(edge: Edge) -> None:
    edge.upstream.is_held = True

    def ask() -> int:
        with edge.client() as own:
            return own.post(INFER, json={}, headers=edge.bearer("late")).status_code

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask) for _ in range(4)]
        active = "http.edge.downstream_rq_active"
        wait_until(lambda: edge.admin.stats(active)[active] == 4, "four requests are in flight")
        process, edge.process = edge.process, None
        process.terminate()
        wait_until(lambda: not listens(edge), "Envoy takes no new connections")
        edge.upstream.is_held = False
    assert process.wait(60) == 0
    assert [each.result() for each in answers] == [200] * 4
    assert not pids_whose_command_holds(str(edge.plan.files.bootstrap))
    edge.start()


def test_a_second_envoy_is_refused(edge: Edge) -> None:
    code, said = run_falaj("--home", str(edge.home), "gateway", "run")
    assert code == 2
    assert "already" in said
    assert edge.admin.is_ready()
