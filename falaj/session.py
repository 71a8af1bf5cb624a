"""Run a flow against a Prefect API: the platform's, a named one, or one of this command's own.

And the commands of who does so: sign in, see who one is, switch accounts off.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from cyclopts import App

from falaj.context import Context, Here, Shown, acting, row
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
from tasks.governance import identity
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


access = App(name="access")


def login(file: Path | None = None, /, *, context: Here) -> Shown:
    """Sign in for later commands; the token is kept in a file that only you can read.

    Args:
        file: With a token (default: standard input, after the address that shows one).

    Raises:
        AccessError: the token is not good.
        ConfigurationError: nobody signs in here.

    Examples:
        falaj login
        falaj login /run/secrets/token
    """
    config = identity.read_sign_in(context.home)
    if config is None:
        raise ConfigurationError(
            f"{context.home} has no sign-in.yaml, so this machine's user is the owner and nobody "
            "signs in. Nothing was kept"
        )
    if file is None:
        sys.stderr.write(f"Open {_token_page(context)} and paste the token that it shows:\n")
        sys.stderr.flush()
    text = sys.stdin.readline() if file is None else file.read_text(encoding="ascii")
    subject = identity.keep_token(text.strip(), config, os.environ)
    kept = identity.token_file(config, os.environ)
    return Shown({"name": subject.name, "file": kept}, [row("Signed in", subject.name)])


def _token_page(context: Context) -> str:
    from infra.gateway.config import has_platform_listener, read_plan

    if not has_platform_listener(context.home):
        return "your issuer's page"
    return f"{read_plan(context.home).address}/sign-in/token"


def whoami(*, context: Here) -> Shown:
    """Show who acts here, with which roles.

    Examples:
        falaj whoami
    """
    found = identity.current_subject(context.home)
    facts = {n: getattr(found, n) for n in ("name", "tenant", "roles", "use_cases")}
    lines = [
        row("Name", found.name),
        row("Tenant", found.tenant or "the owner's"),
        row("Roles", ", ".join(found.roles)),
        row("For", ", ".join(found.use_cases)),
    ]
    return Shown(facts, lines)


def _switched(names: list[str], context: Context, *, off: bool) -> Shown:
    from tasks.governance.duties import who
    from tasks.governance.journal import Journal

    subject = acting(context.settings, "administer", None)
    journal = Journal(context.home / "audit")
    with journal.recorded(f"switch-{'off' if off else 'on'}", accounts=names, who=who(subject)):
        identity.switch(context.home, names, subject.name, off=off)
    return listed(context=context)


@access.command(name="off")
def off(*names: str, context: Here) -> Shown:
    """Refuse accounts from their next request on, whatever token they hold.

    Examples:
        falaj access off omar
    """
    return _switched(list(names), context, off=True)


@access.command(name="on")
def on(*names: str, context: Here) -> Shown:
    """Let accounts in again.

    Examples:
        falaj access on omar
    """
    return _switched(list(names), context, off=False)


@access.command(name="list")
def listed(*, context: Here) -> Shown:
    """List the accounts that are switched off.

    Examples:
        falaj access list
    """
    found = identity.switched_off(context.home)
    lines = [row(name, f"off since {f['since'][:16]}, by {f['by']}") for name, f in found.items()]
    return Shown(found, lines or ["No account is switched off."])
