"""Run a flow against a Prefect API: the platform's, a named one, or one of this command's own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from subprocess import Popen

from falaj.context import Context
from flows.config import PipelineConfig, check_repository, read_pipeline_config
from infra.orchestration.client import running_platform
from infra.orchestration.embedded import (
    client_environment,
    disk_with_space,
    free_port,
    only_run,
    prefect_server,
    send_what_is_left,
    wait_for_server,
)
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings

INTERRUPTED = "interrupted; finished stages are kept, run again to resume"


def run_flow(
    context: Context, work: Callable[[PipelineConfig], list[str]], *, reads_data: bool = True
) -> list[str]:
    """Read the use case, have a Prefect API, do the work; returns its lines and how long it took.

    Args:
        work: calls the flow; it imports the flow's module itself, for Prefect reads its settings
            when it is imported.
        reads_data: the repository's suites and queries are checked before a server is started.

    Raises:
        ConfigurationError: the feature repository is wrong, or another run holds the state folder.
        FalajError: a stage failed.
    """
    started, settings = time.monotonic(), context.settings
    config = read_pipeline_config(settings.feature_repo)
    if reads_data:
        check_repository(config, settings.feature_repo)
    try:
        with disk_with_space(settings.home), only_run(settings.home), _prefect(context) as quiet:
            lines = _with_heartbeats(work, config, quiet)
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(INTERRUPTED) from exc
    return [*lines, f"{'Done':<10}in {time.monotonic() - started:.0f} s"]


def serve_ui(context: Context) -> None:
    """Serve the Prefect UI of the state folder until interrupted.

    Raises:
        ConfigurationError: runs are on another server, which serves its own.
    """
    settings = context.settings
    if context.on_platform:
        os.environ.update(running_platform(settings.home))
    if url := os.environ.get("PREFECT_API_URL"):
        raise ConfigurationError(
            f"the server {url} serves its own UI; open that, or unset PREFECT_API_URL to see the "
            "runs of the state folder"
        )
    with disk_with_space(settings.home), only_run(settings.home), ExitStack() as stack:
        server, port = _own_server(stack, settings)
        wait_for_server(server, settings.home, port)
        sys.stdout.write(f"Prefect UI at http://127.0.0.1:{port} - Ctrl-C ends it\n")
        sys.stdout.flush()
        server.wait()


@contextmanager
def _prefect(context: Context) -> Iterator[bool]:
    """A Prefect API in the environment; true where nothing but this process watches its runs."""
    settings = context.settings
    if context.on_platform:
        os.environ.update(running_platform(settings.home))
    if "PREFECT_API_URL" in os.environ:
        yield False
        return
    with ExitStack() as stack:
        server, port = _own_server(stack, settings)
        _import_while_it_starts(settings)
        wait_for_server(server, settings.home, port)
        from infra.orchestration.retry import end_lost_runs

        end_lost_runs()
        yield True


def _own_server(stack: ExitStack, settings: Settings) -> tuple[Popen[bytes], int]:
    port = free_port()
    server = stack.enter_context(prefect_server(settings.home, port))
    os.environ.update(client_environment(settings.home, port))
    return server, port


def _import_while_it_starts(settings: Settings) -> None:
    import flows.pipeline  # noqa: F401  (takes seconds)

    if not settings.store.root.exists():  # a first run will need these too
        # Feast turns on warnings that the import of Great Expectations would then give.
        import tasks.validation.runner

        # isort: split
        import tasks.features.online.materialization  # noqa: F401


def _with_heartbeats(
    work: Callable[[PipelineConfig], list[str]], config: PipelineConfig, quiet: bool
) -> list[str]:
    """Do the work; without heartbeats where nobody watches them.

    Their thread delays the end of each flow by a second.
    """
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None} if quiet else {}):
        try:
            return work(config)
        finally:
            send_what_is_left()
