"""Run a flow against a Prefect API: the platform's, a named one, or one of this command's own."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from subprocess import Popen

from falaj.context import Context, Here, Shown, row
from flows.config import PipelineConfig, check_repository, read_pipeline_config
from infra.orchestration.embedded import (
    client_environment,
    disk_with_space,
    flows_reported,
    free_port,
    only_run,
    prefect_server,
    wait_for_server,
)
from infra.platform.files import running_platform
from tasks.governance.handling import addresses
from tasks.governance.policy import require_placements
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings
from tasks.training.models.making import check_model

INTERRUPTED = "interrupted; finished stages are kept, run again to resume"


def run_flow(
    context: Context,
    work: Callable[[PipelineConfig], Shown],
    *,
    reads_data: bool = True,
    trains: bool = False,
) -> Shown:
    """Read the use case, have a Prefect API, do the work; a last line tells how long it took.

    Args:
        work: calls the flow; it imports the flow's module itself, for Prefect reads its settings
            when it is imported.
        reads_data: the repository's suites and queries are checked before a server is started.
        trains: so is that the use case's model can be trained here.

    Raises:
        ConfigurationError: the feature repository is wrong, or another run holds the state folder.
        FalajError: a stage failed.
    """
    started, settings = time.monotonic(), context.settings
    config = read_pipeline_config(settings.feature_repo)
    require_placements(settings, addresses(config, os.environ), [config.features.handling])
    if reads_data:
        check_repository(config, settings.feature_repo)
    if trains:
        check_model(config.training, settings.feature_repo)
    try:
        with disk_with_space(settings.home), only_run(settings.home), _prefect(context) as watched:
            from tasks.control.routing.task import keep_results  # imports Prefect
            from tasks.metadata.identity import state_identity

            if settings.location:
                state_identity(settings)  # refuses one that is empty where it should not be
            keep_results()
            with flows_reported(watched=watched):
                shown = work(config)
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(INTERRUPTED) from exc
    took = row("Done", f"in {time.monotonic() - started:.0f} s")
    return replace(shown, lines=[*shown.lines, took])


def ui(*, context: Here) -> None:
    """Serve the Prefect UI of the state folder until interrupted.

    Raises:
        ConfigurationError: runs are on another server, which serves its own.

    Examples:
        falaj ui
    """
    home = context.home
    if url := _other_server(context):
        raise ConfigurationError(
            f"the server {url} serves its own UI; open that, or unset PREFECT_API_URL to see the "
            "runs of the state folder"
        )
    with disk_with_space(home), only_run(home), _own_server(context.settings) as (server, port):
        wait_for_server(server, home, port)
        sys.stdout.write(f"Prefect UI at http://127.0.0.1:{port} - Ctrl-C ends it\n")
        sys.stdout.flush()
        server.wait()


def _other_server(context: Context) -> str | None:
    if context.on_platform:
        os.environ.update(running_platform(context.home))
    return os.environ.get("PREFECT_API_URL")


@contextmanager
def _prefect(context: Context) -> Iterator[bool]:
    """A Prefect API in the environment; false where nothing but this process watches its runs."""
    if _other_server(context):
        yield True
        return
    settings = context.settings
    with _own_server(settings) as (server, port):
        _import_while_it_starts(settings)
        wait_for_server(server, settings.home, port)
        from infra.orchestration.retry import end_lost_runs

        end_lost_runs()
        yield False


@contextmanager
def _own_server(settings: Settings) -> Iterator[tuple[Popen[bytes], int]]:
    port = free_port()
    with prefect_server(settings.home, port) as server:
        os.environ.update(client_environment(settings.home, port))
        yield server, port


def _import_while_it_starts(settings: Settings) -> None:
    import flows.pipeline  # noqa: F401  (all of these take seconds)
    import tasks.lineage.journal
    from tasks.registry.connection import load_mlflow

    load_mlflow()
    if not settings.store.root.exists():  # a first run will need these too
        # Feast turns on warnings that the import of Great Expectations would then give.
        import tasks.validation.runner
        from tasks.features.access.profile import import_feast

        import_feast()
        import tasks.features.online.materialization  # noqa: F401
