"""Base job templates: of the installed workers' shape, and Kubernetes takes what they make."""

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate
import pytest
import yaml
from prefect.client.schemas.objects import FlowRun
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker
from prefect_kubernetes.worker import KubernetesWorker, KubernetesWorkerJobConfiguration

from infra.deploying.file import POOLS_FOLDER as FOLDER
from infra.deploying.file import read_pools_file

KUBERNETES = [f"kubernetes/{name}.json" for name in ("coordinator", "cpu", "gpu", "hosts")]
TEMPLATES = [*KUBERNETES, "process/cpu.json", "process/gpu.json"]
OLDEST_CLUSTER = "1.31"
NEWEST_CLUSTER = "1.36"
MISPLACED = {"completions", "parallelism"}


@pytest.fixture(autouse=True)
def _no_server_is_started() -> Iterator[None]:
    """The worker's code opens a client, which it needs for references to blocks alone."""
    nowhere = "http://127.0.0.1:9/api"
    with temporary_settings({PREFECT_API_URL: nowhere, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}):
        yield


def template(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text())


def placeholders(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from re.findall(r"\{\{\s*(\w+)\s*\}\}", value)
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from placeholders(inner)


def job_of(name: str, **values: Any) -> dict[str, Any]:
    """The job that a worker would make of a template, with example values."""

    async def make() -> dict[str, Any]:
        given = {"image": "registry.example.org/falaj:1", "namespace": "ml", **values}
        job = await KubernetesWorkerJobConfiguration.from_template_and_values(template(name), given)
        job.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="fair-run"))
        return dict(job.job_manifest)

    return asyncio.run(make())


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_placeholder_is_a_variable_and_every_variable_is_used(name: str) -> None:
    content = template(name)
    variables = set(content["variables"]["properties"])
    used = set(placeholders(content["job_configuration"]))
    assert used <= variables
    # Both workers merge `env` themselves where the template has one of its own.
    assert variables - used <= {"env"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_variables_of_the_workers_own_template_are_all_there_with_their_types(
    name: str,
) -> None:
    worker = KubernetesWorker if name in KUBERNETES else ProcessWorker
    own = worker.get_default_base_job_template()["variables"]
    ours = template(name)["variables"]
    assert ours["type"] == own["type"]
    assert ours.get("definitions") == own.get("definitions")
    for variable, schema in own["properties"].items():
        kept = {k: v for k, v in ours["properties"][variable].items() if k != "default"}
        assert kept == {k: v for k, v in schema.items() if k != "default"}
    for variable in set(ours["properties"]) - set(own["properties"]):
        assert {"title", "description", "type"} <= set(ours["properties"][variable])


def test_every_template_is_of_a_pool_and_every_pool_has_one() -> None:
    pools = read_pools_file()
    named = {pool.template for pool in [*pools.process.values(), *pools.kubernetes.values()]}
    assert named == set(TEMPLATES)


@pytest.mark.parametrize("version", [OLDEST_CLUSTER, NEWEST_CLUSTER])
@pytest.mark.parametrize("name", KUBERNETES)
def test_kubernetes_takes_the_job(name: str, version: str) -> None:
    values = {"env": {"A": "b"}, "cpu_limit": "4", "service_account_name": "falaj-runs"}
    for given in ({}, values):
        job = job_of(name, **given)
        job["metadata"]["name"] = job["metadata"].pop("generateName") + "abcde"
        for dropped in MISPLACED:
            del pod_of(job)[dropped]
        kubernetes_validate.validate(job, version, strict=True)
        assert not list(placeholders(job))


@pytest.mark.parametrize("name", KUBERNETES)
def test_a_pod_is_shut_in_and_prefect_alone_repeats_it(name: str) -> None:
    job = job_of(name)
    pod = pod_of(job)
    [container] = pod["containers"]
    assert job["spec"]["backoffLimit"] == 0
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
    names = {variable["name"] for variable in container["env"]}
    assert {"FALAJ_HOME", "HOME"} <= names
    written = {
        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    }
    assert {"/var/lib/falaj", "/tmp"} <= written
    # A command of the flow's own still ends in the container's arguments.
    assert container["args"] == [
        *("python", "-m", "infra.orchestration.checked"),
        *("prefect", "flow-run", "execute"),
    ]


@pytest.mark.parametrize("name", KUBERNETES)
def test_secrets_are_named_and_never_written_out(name: str) -> None:
    pod = pod_of(job_of(name, secret_name="mine"))
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "mine", "optional": True}}]
    text = (FOLDER / name).read_text().lower()
    assert not re.search(r"(password|token|auth_string)\"?\s*:\s*\"[^\"{]", text)


def test_a_training_over_several_pods_runs_the_flow_in_the_first_and_ends_with_it() -> None:
    job = job_of("kubernetes/hosts.json", num_hosts=4, hosts_group="delay")
    spec, pod = job["spec"], pod_of(job)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 4
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert spec["template"]["metadata"]["labels"]["falaj.io/hosts"] == "delay"
    assert pod["subdomain"] == "falaj-hosts"
    assert pod["containers"][0]["command"][:2] == ["/bin/sh", "-c"]
    probe = pod["containers"][0]["readinessProbe"]
    assert probe["tcpSocket"]["port"] == pod["containers"][0]["ports"][0]["containerPort"] == 2222


@pytest.mark.parametrize(
    ("index", "expected"), [("0", ["serve", "run a 'b c'"]), ("3", ["serve -D -e"])]
)
def test_the_start_of_a_pod_serves_and_runs_as_its_index_says(
    tmp_path: Path, index: str, expected: list[str]
) -> None:
    """The very script, with programs in place of the SSH server and the flow."""
    told = tmp_path / "told"
    server = tmp_path / "sshd"
    server.write_text(f'#!/bin/sh\nshift 6\necho serve "$@" >> {told}\n')
    flow = tmp_path / "flow"
    flow.write_text(f"#!/bin/sh\necho \"run $1 '$2'\" >> {told}\n")
    for program in (server, flow):
        program.chmod(0o755)
    [container] = pod_of(template("kubernetes/hosts.json")["job_configuration"]["job_manifest"])[
        "containers"
    ]
    script = container["command"][2].replace("/usr/sbin/sshd", str(server))
    subprocess.run(
        ["/bin/sh", "-c", script, "falaj", str(flow), "a", "b c"],
        env={"JOB_COMPLETION_INDEX": index, "PATH": "/usr/bin:/bin"},
        check=True,
    )
    assert told.read_text().splitlines() == expected


@pytest.mark.parametrize("version", [OLDEST_CLUSTER, NEWEST_CLUSTER])
def test_kubernetes_takes_what_several_pods_need_around_them(version: str) -> None:
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes" / "hosts-support.yaml").read_text()))
    kinds = {document["kind"]: document for document in documents}
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    assert kinds["Service"]["metadata"]["name"] == "falaj-hosts"
    assert kinds["Role"]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    account = kinds["ServiceAccount"]["metadata"]["name"]
    assert kinds["RoleBinding"]["subjects"][0]["name"] == account
    default = template("kubernetes/hosts.json")["variables"]["properties"]["service_account_name"]
    assert default["default"] == account


def environment_of(name: str, **values: Any) -> dict[str, Any]:
    async def make() -> dict[str, Any]:
        job = await ProcessJobConfiguration.from_template_and_values(template(name), values)
        assert (
            job.command == "setsid python -m infra.orchestration.checked"
        )  # no two processes before the run's own
        return dict(job.env)

    return asyncio.run(make())


def test_job_variables_of_a_process_become_what_libraries_read() -> None:
    env = environment_of("process/gpu.json", threads=3, gpus="0,1", env={"A": "b"})
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert env["A"] == "b"
    unsaid = environment_of("process/gpu.json")  # left to the machine
    assert not {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} & set(unsaid)
    assert environment_of("process/cpu.json")["CUDA_VISIBLE_DEVICES"] == ""
    given = {"HOME": "/home", "FALAJ_FEATURE_REPO": "/x"}
    pod = pod_of(job_of("kubernetes/gpu.json", gpus=4, env=given))
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    told = {v["name"]: v.get("value") for v in pod["containers"][0]["env"]}
    assert told | given | {"FALAJ_HOME": "/var/lib/falaj"} == told
