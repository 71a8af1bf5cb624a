"""What scales in a cluster by the same rules: KEDA for workers, Kubernetes itself for serving.

A pool's workers follow the runs that are due or in progress in Prefect's database, down to none; a
run is a job of its own there, which goes on without its worker. Serving processes follow the CPU
they use. In both a rule's `cool_down_s` is the time before there are fewer.
"""

from typing import Any

from infra.platform.config import SERVING, PlatformConfig
from infra.platform.scaling import ScalingRule

RUNS = """
SELECT count(*) FROM flow_run
JOIN work_queue ON work_queue.id = flow_run.work_queue_id
JOIN work_pool ON work_pool.id = work_queue.work_pool_id
WHERE work_pool.name = '{pool}' AND (
  flow_run.state_type IN ('PENDING', 'RUNNING', 'CANCELLING')
  OR (flow_run.state_type = 'SCHEDULED' AND flow_run.next_scheduled_start_time <= now()))
"""
POLL_S = 15
Manifest = dict[str, Any]


def manifests(config: PlatformConfig, namespace: str = "falaj") -> list[Manifest]:
    """One for each group that `scaling` names: deployments `falaj-serving`, `falaj-worker-<pool>`.

    The Secret `falaj-prefect-database` has the address of Prefect's database (`connection`).
    """
    found = []
    for name, rule in config.scaling.items():
        serves = name == SERVING
        kind, version = (
            ("HorizontalPodAutoscaler", "autoscaling/v2")
            if serves
            else ("ScaledObject", "keda.sh/v1alpha1")
        )
        target = "falaj-serving" if serves else f"falaj-worker-{name}"
        found.append(
            {
                "apiVersion": version,
                "kind": kind,
                "metadata": {"name": target, "namespace": namespace},
                "spec": _serving(target, rule) if serves else _workers(target, name, rule),
            }
        )
    if any(name != SERVING for name in config.scaling):
        secret = {"parameter": "connection", "name": "falaj-prefect-database", "key": "connection"}
        found.append(
            {
                "apiVersion": "keda.sh/v1alpha1",
                "kind": "TriggerAuthentication",
                "metadata": {"name": "falaj-prefect-database", "namespace": namespace},
                "spec": {"secretTargetRef": [secret]},
            }
        )
    return found


def _serving(target: str, rule: ScalingRule) -> Manifest:
    use = {"type": "Utilization", "averageUtilization": round(100 * rule.busy)}
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
        "minReplicas": rule.least,
        "maxReplicas": rule.affordable,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": use}}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": round(rule.cool_down_s)}},
    }


def _workers(target: str, pool: str, rule: ScalingRule) -> Manifest:
    query = " ".join(RUNS.format(pool=pool).split())
    return {
        "scaleTargetRef": {"name": target},
        "minReplicaCount": rule.least,
        "maxReplicaCount": rule.affordable,
        "pollingInterval": POLL_S,
        "cooldownPeriod": round(rule.cool_down_s),
        "triggers": [
            {
                "type": "postgresql",
                "metadata": {"query": query, "targetQueryValue": f"{rule.load_each:g}"},
                "authenticationRef": {"name": "falaj-prefect-database"},
            }
        ],
    }
