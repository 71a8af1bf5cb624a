"""Retry conditions, delays and the cache rule shared by all `@task` decorators."""

from dataclasses import dataclass
from typing import Any

import httpx
from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.results import ResultStore
from prefect.tasks import Task

from tasks.kernel.errors import TransientError
from tasks.kernel.settings import Settings, code_digest, content_key, named_artifacts

AWAY_CODES = frozenset({429, 500, 502, 503, 504})
"""Without its database the server answers 500."""


def only_transient(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Retry a `TransientError`, or where the Prefect API was away; any other failure stands.

    Prefect's client asks again for about a minute. A server that takes longer to come back would
    else fail a step whose work is done, at the writing of an artifact.

    A plain function on purpose: Prefect never retries when given a `functools.partial`.
    """
    failure = state.result(raise_on_failure=False)
    return isinstance(failure, TransientError) or is_api_away(failure)


RETRIED: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": [5.0, 30.0],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": only_transient,
}
"""What a task's decorator takes: `@task(name=..., **RETRIED, ...)`."""
# The same of a task whose result is kept.
KEPT: dict[str, Any] = {**RETRIED, "persist_result": True, "result_serializer": "json"}


def uncached(timeout_s: float, *, kept: bool = False) -> dict[str, Any]:
    """What the decorator takes of a task that sees by itself what is done already.

    Args:
        timeout_s: seconds after which an attempt is ended.
        kept: whether its result is kept, for a flow that goes on in another process.
    """
    return {**(KEPT if kept else RETRIED), "timeout_seconds": timeout_s, "cache_policy": NO_CACHE}


def is_api_away(failure: object) -> bool:
    """True for what Prefect's client raises when no server answers, or one that cannot just now."""
    if isinstance(failure, httpx.HTTPStatusError):
        return failure.response.status_code in AWAY_CODES
    return isinstance(failure, httpx.TransportError)


@dataclass
class ByContent(CachePolicy):
    """Reuse a finished result while its inputs, its code and its artifacts are unchanged.

    The key is a digest of the task's inputs (contracts carry the digests of their data) and of the
    statements of its room that it reaches. A stored result whose artifacts were removed or damaged
    is passed over: the next free key is taken, so the task runs again.

    Args:
        task_file: `__file__` of the `task.py` that uses the policy.
    """

    task_file: str = ""

    def compute_key(
        self,
        task_ctx: TaskRunContext,
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],
        **kwargs: Any,
    ) -> str:
        """First key, counted from the content's own, that is free or holds a whole result."""
        base = content_key(task_ctx.task.name, code_digest(self.task_file), sorted(inputs.items()))
        key, repeat = base, 0
        while task_ctx.result_store.exists(key) and not _is_whole(task_ctx.result_store, key):
            repeat += 1
            key = f"{base}-{repeat}"
        return key


def _is_whole(results: ResultStore, key: str) -> bool:
    store = Settings.from_environment().store
    return all(store.holds(artifact) for artifact in named_artifacts(results.read(key).result))


def reused(task_file: str, timeout_s: float) -> dict[str, Any]:
    """What the decorator takes of a task that is safe to repeat, and reused for equal inputs.

    Args:
        task_file: `__file__` of its `task.py`.
        timeout_s: seconds after which an attempt is ended.
    """
    policy = ByContent(task_file=task_file)
    return {**KEPT, "timeout_seconds": timeout_s, "cache_policy": policy}
