"""Run the stages of the loop, each where its rule says; time them, and tell work from reuse."""

from __future__ import annotations

import time
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Flow, runtime

from tasks.contracts.run import StageRoute, StageTime
from tasks.control.routing.config import RoutingConfig, StageName
from tasks.control.routing.task import StageOrder, as_returned, dump_parameters, run_stage
from tasks.kernel.settings import ArtifactStore, named_artifacts

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Stages:
    """Runs the stages of one loop after each other and keeps what each took.

    A stage counts as reused when all that its result names was built before it began, whatever
    other loops build meanwhile; one that decides anew each time never does.

    Args:
        use_case: name of the use case.
        routing: where its stages run.
        store: the artifact store that all stages share.
    """

    DECIDES_ANEW = frozenset({"promotion"})

    def __init__(self, use_case: str, routing: RoutingConfig, store: ArtifactStore) -> None:
        self._use_case, self._routing, self._store = use_case, routing, store
        self._by_deployment = routing.mode == "deployments" or (
            routing.mode == "auto" and bool(runtime.deployment.id)
        )
        self.times: list[StageTime] = []

    def run(
        self,
        name: StageName,
        stage: Flow[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Run one stage; its failure passes through."""
        earlier, started = self._store.num_builds, time.monotonic()
        if self._by_deployment:
            told, route = self._on_pool(name, stage, *args, **kwargs)
            result = cast(Result, told)
        else:
            result, route = stage(*args, **kwargs), self._here(name)
        seconds = round(time.monotonic() - started, 2)
        is_new = self._store.built_since(earlier)
        built = any(is_new(artifact) for artifact in named_artifacts(result))
        reused = not built and name not in self.DECIDES_ANEW
        self.times.append(StageTime(stage=name, seconds=seconds, reused=reused, route=route))
        return result

    def _on_pool(
        self, name: StageName, stage: Flow[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, StageRoute]:
        order = StageOrder(
            stage=name,
            flow_name=stage.name,
            parameters=dump_parameters(stage, *args, **kwargs),
            routing=self._routing,
            use_case=self._use_case,
            suffix=_suffix(self._use_case),
        )
        outcome = run_stage(order)
        return as_returned(outcome["result"], stage), StageRoute.model_validate(outcome["route"])

    def _here(self, name: StageName) -> StageRoute:
        forced = self._routing.mode == "in process"
        return StageRoute(
            wanted=self._routing.of(name).hardware_class,
            taken="this process",
            rule="in process",
            reason="routing.mode says so" if forced else "no deployment started this loop",
        )


def _suffix(use_case: str) -> str:
    """What the loop's own deployment has after the flow's name: `-<use case>`; or nothing."""
    suffix = f"-{use_case}"
    return suffix if str(runtime.deployment.name or "").endswith(suffix) else ""
