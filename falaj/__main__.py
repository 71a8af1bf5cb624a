"""Falaj's command line: `python -m falaj COMMAND`; `python -m falaj --help` lists the commands.

Exit codes: 0 done, 1 failed or not all well, 2 wrong usage, configuration or data, 3 no platform
runs, 130 interrupted. A command's module is imported when it is chosen.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter

from falaj.context import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_WRONG_INPUT, read_context
from tasks.kernel.errors import ConfigurationError, DataContractError, FalajError
from tasks.kernel.files import temporary_files

COMMANDS = {
    "Loop": {
        "init": ("onboarding.commands:init", "Begin a project from a file."),
        "check": ("onboarding.commands:check", "Find mistakes in a project without training."),
        "run": ("loop:run", "Run the whole loop once; it ends with a report."),
        "train": ("loop:train", "Train, judge and register a candidate."),
        "search": ("loop:search", "Search for better training settings."),
        "compress": ("loop:compress", "Prune a version's network, or distil it to a small one."),
        "recalibrate": ("loop:recalibrate", "Fit the champion's calibrator on newer labels."),
        "drift": ("loop:drift", "Compare one window with the training reference."),
        "import": ("loop:import_model", "Register and convert a model trained elsewhere."),
        "retry": ("loop:retry", "Resume a failed or killed loop at the stage that failed."),
        "ui": ("loop:ui", "Serve the Prefect UI of the state folder until interrupted."),
    },
    "Data": {
        "features": ("features:app", "Refresh, compare, serve and repair features."),
        "baseline": ("data:approve_baseline", "Approve a clean window as the suites' baseline."),
        "docs": ("data:docs", "Bring the data docs of all validations up to date."),
        "trace": ("data:trace", "Show what something was made from, to the raw files."),
        "predictions": ("predictions:app", "Count, export, label and erase logged predictions."),
    },
    "Control": {
        "models": ("models:app", "Approve, reject or withdraw a model version."),
        "release": ("release:app", "Show and steer the release of a version."),
        "decisions": ("release:decisions", "List the decisions about drift, newest first."),
        "audit": ("features:audit", "Show who changed features and models."),
    },
    "Services": {
        "up": ("platform:up", "Start the platform and deploy; harmless where it runs."),
        "down": ("platform:down", "Let runs end, then stop the platform."),
        "status": ("platform:status", "Show what runs."),
        "doctor": ("platform:doctor", "Find what is wrong with the platform, and what to do."),
        "logs": ("platform:logs", "Show the last lines of a service's log."),
        "supervise": ("platform:supervise", "Be the supervisor, in the foreground."),
        "deploy": ("platform:deploy", "Write pools, deployments and automations to Prefect."),
        "serve": ("platform:serve", "Serve models over HTTP and gRPC."),
        "gateway": ("gateway:app", "Run the gateway and set shares of traffic."),
        "keys": ("keys:app", "Create, list and revoke API keys."),
        "certificates": ("keys:certificates", "Issue a certificate of a private authority."),
    },
}
app = App(
    name="falaj",
    help="Keep a machine-learning model good.",
    help_format="plaintext",
    version_flags=[],
    default_parameter=Parameter(negative=""),
    result_action="return_value",
)
app.meta.suppress_keyboard_interrupt = False
app.meta.group_parameters = Group("Options of all commands", sort_key=0)
for _order, (_title, _commands) in enumerate(COMMANDS.items()):
    _group = Group(_title, sort_key=_order)
    for _name, (_path, _help) in _commands.items():
        app.command(f"falaj.{_path}", name=_name, help=_help, group=_group)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    home: Path | None = None,
    repo: list[str] | None = None,
    on_platform: bool = False,
) -> int:
    """Read the common options, run the command, print its lines.

    Args:
        tokens: the command and its arguments.
        home: State folder (default: .falaj, or FALAJ_HOME).
        repo: Feature repository of the use case (default: feature_repo/flights, or
            FALAJ_FEATURE_REPO). `deploy` takes several, each PATH or PATH=PATH_ON_WORKERS.
        on_platform: Run flows on the platform of the state folder.
    """
    command, bound, ignored = app.parse_args(tokens, exit_on_error=False)
    context = {"context": read_context(home, repo or [], on_platform)}
    found: Any = command(*bound.args, **bound.kwargs, **{n: context[n] for n in ignored})
    if not isinstance(found, list):
        return found or 0
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.stdout.flush()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        with temporary_files():
            code: int = app.meta(arguments, exit_on_error=False, result_action="return_value")
            return code or 0
    except CycloptsError:  # printed already
        return EXIT_WRONG_INPUT
    except (ConfigurationError, DataContractError) as exc:
        return _failed(exc, f"refused: {exc}", EXIT_WRONG_INPUT)
    except FalajError as exc:
        return _failed(exc, f"failed: {type(exc).__name__}: {exc}", EXIT_FAILED)
    except KeyboardInterrupt as exc:
        return _failed(exc, str(exc) or "interrupted", EXIT_INTERRUPTED)


def _failed(exc: BaseException, message: str, code: int) -> int:
    """Free what the frames of an error hold: Prefect keeps the error until Python ends.

    A DuckDB connection held until then is listed as leaked, in forty lines below the message.
    """
    cause: BaseException | None = exc
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
