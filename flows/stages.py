"""Time the stages of the loop, and tell work from reuse."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tasks.contracts import StageTime
from tasks.settings import ArtifactStore

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class StageClock:
    """Runs the stages of one loop after each other and keeps what each took.

    A stage counts as reused when the artifact store built nothing during it; one that decides anew
    each time never does.
    """

    DECIDES_ANEW = frozenset({"promotion"})

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self.stages: list[StageTime] = []

    def run(
        self,
        name: str,
        stage: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Run one stage; its failure passes through."""
        builds, started = self._store.num_builds, time.monotonic()
        result = stage(*args, **kwargs)
        reused = self._store.num_builds == builds and name not in self.DECIDES_ANEW
        seconds = round(time.monotonic() - started, 2)
        self.stages.append(StageTime(stage=name, seconds=seconds, reused=reused))
        return result
