"""Falaj's command line: `falaj COMMAND`, or `python -m falaj COMMAND`; `--help` lists them.

Exit codes: 0 done; 1 failed, or not all well; 2 wrong usage or configuration; 3 not running; 4 data
refused; 5 a gate refused; 6 drift found (5 of `run` and 6 with `--exit-code`); 130 interrupted.
A command's module is imported when it is chosen.
"""

import atexit
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter

from falaj.context import (
    EXIT_DATA,
    EXIT_FAILED,
    EXIT_GATE,
    EXIT_INTERRUPTED,
    EXIT_NOT_RUNNING,
    EXIT_WRONG_INPUT,
    OPTIONS,
    Context,
    Shown,
    set_environment,
    show,
)
from tasks.kernel import errors

COMMANDS = {
    "Every day": {
        "init": ("onboarding.commands:init", "Begin a project with a look at the data."),
        "check": ("onboarding.commands:check", "Find mistakes in a project without training."),
        "run": ("loop:run", "Run the whole loop once; it ends with a report."),
        "status": ("status:status", "Show how the models are, and what runs."),
        "open": (
            "status:open_address",
            "Open the report, the UI or the docs, or print where they are.",
        ),
    },
    "Start": {
        "demo": ("setup:demo", "Run the whole loop on an example, in a new folder."),
        "setup": ("setup:setup", "Build Horovod for the installed PyTorch."),
    },
    "Loop": {
        "train": ("loop:train", "Train, judge and register a candidate."),
        "search": ("loop:search", "Search for better training settings."),
        "compress": ("loop:compress", "Prune a version's network, or distil it to a small one."),
        "recalibrate": ("loop:recalibrate", "Fit the champion's calibrator on newer labels."),
        "import": ("loop:import_model", "Register and convert a model trained elsewhere."),
        "convert": ("loop:convert", "Convert a registered version again."),
        "promote": ("loop:promote", "Take a registered version through all gates."),
        "drift": ("loop:drift", "Compare one window with the training reference."),
        "replay": ("loop:replay", "Replay the history under several policies of retraining."),
        "retry": ("loop:retry", "Resume a failed or killed loop at the stage that failed."),
    },
    "Data": {
        "features": ("features:app", "Refresh, compare, serve and repair features."),
        "baseline": ("data:approve_baseline", "Approve a clean window as the suites' baseline."),
        "docs": ("data:docs", "Bring the data docs of all validations up to date."),
        "catalogue": ("governance.catalogue:catalogue", "Show feature views and who uses them."),
        "trace": ("governance.verify:trace", "Show what something was made from, or what of it."),
        "verify": ("governance.verify:verify", "Check a model by its digests, to the raw files."),
        "predictions": ("data:predictions", "Count, export and label logged predictions."),
        "erase": ("governance.erase:erase", "Erase all rows of one entity, with a certificate."),
        "export-subject": (
            "governance.erase:export_subject",
            "Write all rows of one entity to a folder.",
        ),
    },
    "Control": {
        "models": ("models:app", "List, show, approve and withdraw model versions."),
        "release": ("release:app", "Show and steer the release of a version."),
        "decisions": ("release:decisions", "List the decisions about drift, newest first."),
        "costs": ("costs:costs", "Show what runs took and cost, and what is ahead."),
        "policy": ("data:policy", "Show what may be placed where, by which law."),
        "audit": (
            "governance.audit:app",
            "Show and verify the journal: who did what, what was refused.",
        ),
        "evidence": ("governance.evidence:evidence", "Collect what shows an auditor's controls."),
    },
    "Services": {
        "up": ("platform:up", "Start the platform and deploy; harmless where it runs."),
        "down": ("platform:down", "Let runs end, then stop the platform."),
        "doctor": ("platform:doctor", "Find what is wrong with the platform, and what to do."),
        "logs": ("platform:logs", "Show the last lines of a service's log."),
        "ui": ("session:ui", "Serve the Prefect UI of the state folder until interrupted."),
        "worker": ("platform:worker", "Take work of a platform on another machine."),
        "supervise": ("platform:supervise", "Be the supervisor, in the foreground."),
        "manifests": ("platform:manifests", "Print what scales all in a Kubernetes cluster."),
        "deploy": ("platform:deploy", "Write pools, deployments and automations to Prefect."),
        "serve": ("platform:serve", "Serve models over HTTP and gRPC."),
        "gateway": ("platform:gateway", "Run the gateway and set shares of traffic."),
        "keys": ("platform:keys", "Create, list and revoke API keys."),
        "login": ("session:login", "Sign in for later commands."),
        "whoami": ("session:whoami", "Show who acts here, with which roles."),
        "access": ("session:access", "Switch accounts off and on."),
        "tenants": ("governance.tenants:app", "Add and list tenants, and what each may hold."),
        "grants": ("governance.grants:app", "Let other tenants read feature views, until revoked."),
        "accounts": ("platform:accounts", "Add, disable and list people who sign in."),
        "certificates": ("platform:certificates", "Issue a certificate of a private authority."),
    },
    "State": {
        "backup": ("state:backup", "Copy the whole state, while it is used, to a place or store."),
        "restore": ("state:restore", "Bring a backup into an empty state, here or elsewhere."),
        "prune": ("state:prune", "Show, and remove with --yes, what nothing needs any more."),
        "encryption": (
            "governance.encryption:app",
            "Encrypt the state, rotate and destroy its key.",
        ),
        "migrate": ("state:migrate", "Move the state to S3, PostgreSQL and Redis."),
    },
    "This command line": {
        "config": ("status:config", "Show the effective settings and use case."),
        "completion": ("status:completion", "Print the completion of a shell."),
    },
}
READS = frozenset(
    "check,status,open,show,list,read,trace,verify,parity,counts,settings,drift,replay,decisions,"
    "costs,whoami,audit,begin,doctor,logs,ui,manifests,completion".split(",")
)
"""Last words of the commands that change nothing, or say in the journal themselves what they do: of
these refusals alone are recorded."""
app = App(
    name="falaj",
    help="Keep a machine-learning model good.",
    help_format="plaintext",
    version=lambda: version("falaj"),
    version_flags=["--version"],
    default_parameter=Parameter(negative=""),
    result_action="return_value",
)
app["--help"].group = app["--version"].group = Group("Help", sort_key=98)
app.meta.suppress_keyboard_interrupt = False
app.meta.group_parameters = Group("Options of all commands", sort_key=99)
for _order, (_title, _commands) in enumerate(COMMANDS.items()):
    _group = Group(_title, sort_key=_order)
    for _name, (_path, _help) in _commands.items():
        app.command(f"falaj.{_path}", name=_name, help=_help, group=_group)


def _flag(*names: str) -> Parameter:
    return Parameter(name=names, show_default=False)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    home: Path | None = None,
    project: Annotated[list[str] | None, Parameter(name=["--project", "--repo"])] = None,
    on_platform: Annotated[bool, _flag("--on-platform")] = False,
    as_json: Annotated[bool, _flag("--json")] = False,
    quiet: Annotated[bool, _flag("--quiet", "-q")] = False,
    verbose: Annotated[bool, _flag("--verbose", "-v")] = False,
    yes: Annotated[bool, _flag("--yes", "-y")] = False,
) -> int:
    """Read the common options, run the command, show what it returns.

    Args:
        tokens: the command and its arguments.
        home: State folder (default: .falaj, or FALAJ_HOME).
        project: Folder of use_case.yaml (default: found upward, or FALAJ_FEATURE_REPO).
        on_platform: Run flows on the platform of the state folder.
        as_json: Print one JSON document.
        quiet: Log warnings and errors only.
        verbose: Log details, and where an error comes from.
        yes: Answer yes to every question.
    """
    if quiet and verbose:
        raise errors.ConfigurationError("--quiet and --verbose exclude each other")
    command, bound, ignored = app.parse_args(tokens, exit_on_error=False)
    set_environment(home, project or [], "WARNING" if quiet else "DEBUG" if verbose else None)
    if not ignored:
        return show(command(*bound.args, **bound.kwargs), as_json=as_json)
    from falaj.governance.audit import recorded_command
    from tasks.kernel.files import temporary_files

    context = Context(None, tuple(project or ()), on_platform, as_json, yes)
    words = app.parse_commands(tokens)[0]
    changes = words[-1] not in READS and not bound.arguments.get("dry_run")
    # The document alone is on standard output, whatever a command or a library prints.
    printed = redirect_stdout(sys.stderr) if as_json else nullcontext()
    with (
        temporary_files(),
        printed,
        recorded_command(" ".join(words), context, changes=changes) as act,
    ):
        found: Any = command(*bound.args, **bound.kwargs, **dict.fromkeys(ignored, context))
        act["code"] = found.code if isinstance(found, Shown) else found
    return show(found, as_json=as_json)


def _show_examples(words: Sequence[str]) -> None:
    """Let the help of a command have its own options apart, and end with docstring's examples."""
    chosen = app
    for word in words:
        chosen = chosen[word] if word in chosen and not word.startswith("-") else chosen
    if chosen.default_command is not None:
        text = inspect.getdoc(chosen.default_command) or ""
        _, title, shown = text.partition("\nExamples:\n")
        chosen.group_parameters, chosen.help_epilogue = OPTIONS, (title + shown).strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if {"--help", "-h"} & {*words}:
            _show_examples(words)
        return app.meta(words, exit_on_error=False, result_action="return_value") or 0
    except CycloptsError:  # printed already
        return EXIT_WRONG_INPUT
    except errors.FalajError as exc:
        code = next((code for kind, code in CODES.items() if isinstance(exc, kind)), EXIT_FAILED)
        failed = f"failed: {type(exc).__name__}" if code == EXIT_FAILED else "refused"
        traced = {"-v", "--verbose"} & {*words}
        return _failed(exc, f"{failed}: {exc} [{exc.code}]", code, traced)
    except KeyboardInterrupt as exc:
        return _failed(exc, str(exc) or "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


CODES: dict[type[errors.FalajError], int] = {
    errors.NotRunningError: EXIT_NOT_RUNNING,
    errors.ConfigurationError: EXIT_WRONG_INPUT,
    errors.DataContractError: EXIT_DATA,
    errors.PromotionRefusedError: EXIT_GATE,
    errors.PlacementRefusedError: EXIT_GATE,
}


def _failed(exc: BaseException, message: str, code: int, traced: object = None) -> int:
    """Free what the frames of an error hold: Prefect keeps the error until Python ends.

    A DuckDB connection held until then is listed as leaked, in forty lines below the message.
    """
    sys.stdout.flush()
    if traced:
        traceback.print_exception(exc)
    cause: BaseException | None = exc
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    sys.stderr.write(f"{message}\n")
    return code


def command() -> NoReturn:
    """`main` as a program: after its threads and exit functions it ends at once.

    Python would first search all modules for garbage: after a loop two seconds of CPU, which no
    meter inside the process can see.
    """
    code = main()
    with suppress(KeyboardInterrupt):  # it ends already
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does before exit functions
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):  # nobody reads, or the disk is full
        code = EXIT_FAILED
    os._exit(code)


if __name__ == "__main__":
    command()
