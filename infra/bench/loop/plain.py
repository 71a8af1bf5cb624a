"""Run the loop's own functions without Prefect: what orchestration is measured against.

Flows and tasks are called as the plain functions they wrap; nothing is recorded, cached or retried
by Prefect. Everything else is the same code on the same data.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any


def without_prefect() -> None:
    """Make every flow and task a plain call, and every Prefect artifact nothing."""
    import prefect
    import prefect.artifacts
    import prefect.logging
    import prefect.states

    def call(self: Any, *args: Any, return_state: bool = False, **kwargs: Any) -> Any:
        result = self.fn(*args, **kwargs)
        return prefect.states.Completed(data=result) if return_state else result

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def logger(*args: Any, **kwargs: Any) -> logging.Logger:
        return logging.getLogger("plain")

    prefect.Task.__call__ = call  # type: ignore[method-assign, assignment]
    prefect.Flow.__call__ = call  # type: ignore[method-assign, assignment]
    for name in ("table", "markdown", "image", "link", "progress"):
        setattr(prefect.artifacts, f"create_{name}_artifact", nothing)
    prefect.artifacts.update_progress_artifact = nothing  # type: ignore[assignment]
    prefect.get_run_logger = prefect.logging.get_run_logger = logger


def main(home: str) -> None:
    """Run the loop once, plain, on the state folder `home`."""
    import os
    import uuid

    os.environ["FALAJ_HOME"] = home
    for name in ("ID", "ROOT_FLOW_RUN_ID"):  # lineage names the flow run that a step belongs to
        os.environ[f"PREFECT__RUNTIME__FLOW_RUN__{name}"] = str(uuid.UUID(int=1))
    os.environ["PREFECT__RUNTIME__FLOW_RUN__FLOW_NAME"] = "plain"
    without_prefect()
    from flows.config import read_pipeline_config
    from flows.pipeline import pipeline_flow
    from tasks.kernel.settings import Settings

    Path(home).mkdir(parents=True, exist_ok=True)
    pipeline_flow(read_pipeline_config(Settings.from_environment().feature_repo))


if __name__ == "__main__":
    main(sys.argv[1])
