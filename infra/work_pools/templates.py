"""Base job templates: those of the installed workers, with the differences that stand here.

The files beside this module are made by `python -m infra.work_pools`; a test holds both together,
so a newer Prefect shows what it changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from prefect.workers.process import ProcessWorker

Template = dict[str, Any]

USER_ID = 10001
STATE_FOLDER = "/var/lib/falaj"
SSH_FOLDER = "/etc/falaj/ssh"
SSH_PORT = 2222
HOSTS_LABEL = "falaj.io/hosts"
HOSTS_SERVICE = "falaj-hosts"
MAIN_POD_INDEX = "0"

RUN_OR_SERVE = f"""\
serve="/usr/sbin/sshd -o PidFile=none -o Port={SSH_PORT} -f {SSH_FOLDER}/sshd_config"
if [ "$JOB_COMPLETION_INDEX" != {MAIN_POD_INDEX} ]; then exec $serve -D -e; fi
$serve && exec "$@"
"""
"""Every pod serves SSH, through which ranks are started; the first runs the flow as well."""


def process_template(*, sees_gpus: bool) -> Template:
    """A process on the worker's machine.

    Differences from Prefect's own:
        threads: variable; threads of numeric libraries, left to them where it is not given.
        gpus: variable; devices that the run sees. Without GPUs in the class it sees none, so work
            for processors never takes memory of one.
    """
    template = copy.deepcopy(ProcessWorker.get_default_base_job_template())
    variables = template["variables"]["properties"]
    variables["threads"] = {
        "title": "Threads",
        "description": "Threads of numeric libraries (OpenMP, MKL); not given: all cores.",
        "type": "integer",
        "minimum": 1,
    }
    variables["gpus"] = {
        "title": "GPUs",
        "description": "Devices that the run sees, such as `0,1` or a MIG device's name; empty: "
        "none. Not given: all, and training takes its own through leases.",
        "type": "string",
        **({} if sees_gpus else {"default": ""}),
    }
    template["job_configuration"]["env"] = {
        "OMP_NUM_THREADS": "{{ threads }}",
        "MKL_NUM_THREADS": "{{ threads }}",
        "CUDA_VISIBLE_DEVICES": "{{ gpus }}",
    }
    return template


def cpu_template() -> Template:
    """A pod on processors: Prefect's own template, and the differences of each function below."""
    template = _kubernetes_default()
    _ask_for_an_image(template)
    _count_pods_where_kubernetes_looks(template)
    _ask_for_resources(template, cpu="2", memory="4Gi", memory_limit="8Gi")
    _shut_in(template)
    _give_folders(template)
    _give_secrets_by_name(template)
    _end_in_order(template)
    return template


def coordinator_template() -> Template:
    """A pod that starts others and waits for them: as on processors, and small."""
    template = cpu_template()
    _ask_for_resources(template, cpu="250m", memory="1Gi", memory_limit="2Gi")
    return template


def gpu_template() -> Template:
    """A pod with NVIDIA GPUs of one node: as on processors, and devices."""
    template = cpu_template()
    _ask_for_resources(template, cpu="4", memory="16Gi", memory_limit="32Gi")
    _variables(template)["gpus"] = {
        "title": "GPUs",
        "description": "Whole devices of one node; the device plugin must offer nvidia.com/gpu.",
        "type": "integer",
        "minimum": 1,
        "default": 1,
    }
    limits = _container(template)["resources"]["limits"]
    limits["nvidia.com/gpu"] = "{{ gpus }}"
    _pod(template)["tolerations"] = [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    _give_shared_memory(template)
    return template


def hosts_template() -> Template:
    """A training over several pods: an indexed job whose first pod runs the flow.

    Each runs an SSH server that lets in their common key alone. The first finds them all as
    `training.elastic.discovery: kubernetes` with `place: <namespace>/falaj.io/hosts=<group>`, and
    reaches each by its name under the headless service `falaj-hosts`. When the first pod succeeds
    the job has succeeded, and Kubernetes ends the others.
    """
    template = cpu_template()
    variables = _variables(template)
    variables["num_hosts"] = {
        "title": "Hosts",
        "description": "Pods: one that runs the flow and trains, and others that train.",
        "type": "integer",
        "minimum": 2,
        "default": 2,
    }
    variables["hosts_group"] = {
        "title": "Group of hosts",
        "description": "Label by which the flow finds its pods; two trainings at once need two.",
        "type": "string",
        "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        "default": "training",
    }
    variables["ssh_secret"] = {
        "title": "Secret with SSH keys",
        "description": "Holds id, known_hosts, authorized_keys, host_key and sshd_config.",
        "type": "string",
        "default": "falaj-ssh",
    }
    spec = template["job_configuration"]["job_manifest"]["spec"]
    spec["completions"] = spec["parallelism"] = "{{ num_hosts }}"
    spec["completionMode"] = "Indexed"
    spec["successPolicy"] = {"rules": [{"succeededIndexes": MAIN_POD_INDEX}]}
    # The group is what the flow looks for; the role is what the service serves, of every group.
    spec["template"]["metadata"] = {
        "labels": {HOSTS_LABEL: "{{ hosts_group }}", "falaj.io/role": "host"}
    }
    variables["service_account_name"]["default"] = HOSTS_SERVICE
    pod, container = _pod(template), _container(template)
    pod["subdomain"] = HOSTS_SERVICE
    pod["automountServiceAccountToken"] = True  # to list its pods; see hosts-support.yaml
    _spread_over_nodes(pod)
    # The arguments, Prefect's command, are what the first pod runs.
    container["command"] = ["/bin/sh", "-c", RUN_OR_SERVE, "falaj"]
    container["ports"] = [{"name": "ssh", "containerPort": SSH_PORT}]
    container["readinessProbe"] = {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2}
    pod["volumes"].append(
        {"name": "ssh", "secret": {"secretName": "{{ ssh_secret }}", "defaultMode": 0o440}}
    )
    container["volumeMounts"].append({"name": "ssh", "mountPath": SSH_FOLDER, "readOnly": True})
    _give_shared_memory(template)
    return template


TEMPLATES: dict[str, Callable[[], Template]] = {
    "process/cpu.json": lambda: process_template(sees_gpus=False),
    "process/gpu.json": lambda: process_template(sees_gpus=True),
    "kubernetes/coordinator.json": coordinator_template,
    "kubernetes/cpu.json": cpu_template,
    "kubernetes/gpu.json": gpu_template,
    "kubernetes/hosts.json": hosts_template,
}
"""File, beside this module, to what makes its content."""


def _kubernetes_default() -> Template:
    """From the installed integration: what Prefect's command line gives is an older copy."""
    from prefect_kubernetes.worker import KubernetesWorker

    return copy.deepcopy(KubernetesWorker.get_default_base_job_template())


def _variables(template: Template) -> dict[str, Any]:
    variables: dict[str, Any] = template["variables"]["properties"]
    return variables


def _pod(template: Template) -> dict[str, Any]:
    pod: dict[str, Any] = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    return pod


def _container(template: Template) -> dict[str, Any]:
    container: dict[str, Any] = _pod(template)["containers"][0]
    return container


def _count_pods_where_kubernetes_looks(template: Template) -> None:
    """Prefect's own has `completions` and `parallelism` in the pod, where they mean nothing.

    There they stay all the same: the worker refuses a job without them, and Kubernetes drops them.
    """
    pod, spec = _pod(template), template["job_configuration"]["job_manifest"]["spec"]
    spec["completions"], spec["parallelism"] = pod["completions"], pod["parallelism"]


def _ask_for_an_image(template: Template) -> None:
    """A run without one is refused: Prefect's own image has no flow of this project in it."""
    del _variables(template)["image"]["default"]
    template["variables"]["required"] = ["image"]


def _ask_for_resources(template: Template, *, cpu: str, memory: str, memory_limit: str) -> None:
    """Requests and a memory limit for every run.

    No limit on processors: it would slow a run down on an idle node.
    """
    variables = _variables(template)
    variables["cpu_request"]["default"] = cpu
    variables["memory_request"]["default"] = memory
    variables["memory_limit"]["default"] = memory_limit


def _shut_in(template: Template) -> None:
    """No root, no way to become it, no capability, no writing outside the mounted folders."""
    _pod(template)["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    _pod(template)["automountServiceAccountToken"] = False
    _container(template)["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _give_folders(template: Template) -> None:
    """The state folder from a claim that all pods share, and room for temporary files."""
    variables = _variables(template)
    variables["state_claim"] = {
        "title": "Claim of the state folder",
        "description": "PersistentVolumeClaim, ReadWriteMany, that holds FALAJ_HOME.",
        "type": "string",
        "default": "falaj-state",
    }
    variables["scratch_size"] = {
        "title": "Scratch space",
        "description": "Largest size of temporary files, as a Kubernetes quantity.",
        "type": "string",
        "default": "20Gi",
    }
    _pod(template)["volumes"] = [
        {"name": "state", "persistentVolumeClaim": {"claimName": "{{ state_claim }}"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "{{ scratch_size }}"}},
    ]
    _container(template)["volumeMounts"] = [
        {"name": "state", "mountPath": STATE_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    # Not under the container's `env`: the worker puts a list there, and this beside it.
    variables["env"]["default"] = {"FALAJ_HOME": STATE_FOLDER, "HOME": "/tmp"}


def _give_secrets_by_name(template: Template) -> None:
    """Passwords come from a secret in the namespace, never through Prefect's database."""
    _variables(template)["secret_name"] = {
        "title": "Secret",
        "description": "Its keys become environment variables: passwords of databases and stores. "
        "Prefect's own password is given by the worker; see hosts-support.yaml.",
        "type": "string",
        "default": "falaj",
    }
    _container(template)["envFrom"] = [
        {"secretRef": {"name": "{{ secret_name }}", "optional": True}}
    ]


def _end_in_order(template: Template) -> None:
    """Time to write a checkpoint after SIGTERM; a finished job is kept for a day.

    `backoff_limit` stays 0: Prefect alone decides what runs again.
    """
    variables = _variables(template)
    variables["grace_s"] = {
        "title": "Grace",
        "description": "Seconds between SIGTERM and SIGKILL.",
        "type": "integer",
        "minimum": 1,
        "default": 60,
    }
    _pod(template)["terminationGracePeriodSeconds"] = "{{ grace_s }}"
    variables["finished_job_ttl"]["default"] = 24 * 3600


def _give_shared_memory(template: Template) -> None:
    """Ranks of one pod exchange tensors there; a container has 64 MiB by default."""
    _pod(template)["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    _container(template)["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})


def _spread_over_nodes(pod: dict[str, Any]) -> None:
    pod["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {HOSTS_LABEL: "{{ hosts_group }}"}},
        }
    ]
