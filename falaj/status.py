"""Commands that show: how models are and what runs, where things are, what is in force."""

from __future__ import annotations

import json
import os
import re
import sys
import webbrowser
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import metadata
from pathlib import Path
from typing import Any, Literal

from cyclopts import App

from falaj.context import EXIT_FAILED, Context, Here, Shown, row
from falaj.models import open_registry, quality_text, version_facts
from falaj.platform import platform_files
from flows.config import PipelineConfig, read_pipeline_config
from infra.orchestration.client import is_running
from tasks.kernel.errors import ArtifactError, ConfigurationError, NotRunningError
from tasks.kernel.keys.encryption import ENCRYPTION
from tasks.kernel.settings import PROJECT_ROOT, USE_CASE_FILE, Settings, platform_address

HIDDEN = "***"
config = App(name="config")


def status(*, context: Here) -> Shown:
    """Show how the models are, and what runs.

    Exit code 1 where something is down or the use case cannot be read, 3 where a platform was
    started on this state folder and runs no more. Where none was ever started, none is missed.

    Examples:
        falaj status
        falaj status --json
    """
    from infra.platform.health import read_status, table
    from tasks.governance.duties import broken_glass

    files, settings = platform_files(context), context.settings
    platform = read_status(files)
    code = platform.exit_code if platform.running or files.config.exists() else 0
    try:
        use_case = read_pipeline_config(settings.feature_repo)
        facts, lines = model_status(use_case, settings), None
    except ConfigurationError as exc:
        facts, lines = {"trouble": str(exc)}, [row("Project", exc)]
        if (settings.feature_repo / USE_CASE_FILE).exists():
            code = code or EXIT_FAILED
    broken = broken_glass(context.home)
    shown = [*(row("GLASS", each) for each in broken), *(lines or _model_lines(facts)), ""]
    found = {"model": facts, "platform": platform, "break_glass": broken}
    return Shown(found, [*shown, *table(platform).splitlines()], code)


def model_status(use_case: PipelineConfig, settings: Settings) -> dict[str, Any]:
    """Champion and candidate of a use case, its last drift result, open release and last run.

    Raises:
        RegistryError: the registry refused.
        TransientError: the registry or the database of operation was busy.
    """
    from tasks.registry.connection import RegistryLocation
    from tasks.registry.mlflow_registry import CANDIDATE, CHAMPION
    from tasks.registry.promotion import find_champion_state

    name, now = use_case.registry.model_name, datetime.now(UTC)
    registry = open_registry(settings)
    known = [version_facts(v, registry) for v in registry.versions(name)] if registry else []
    named = {alias: facts for facts in known for alias in facts["aliases"]}
    state = find_champion_state(name, RegistryLocation.of(settings), now)

    def waits(asked: Any) -> bool:
        return bool(asked) and asked.state == "waiting" and now < asked.deadline

    return {
        "use_case": use_case.name,
        "model": name,
        "champion": named.get(CHAMPION),
        "candidate": named.get(CANDIDATE),
        "promoted_at": state.promoted_at if state else None,
        "waits_for_approval": [one["version"] for one in known if waits(one["approval"])],
        **_operation(use_case, settings),
        "last_run": _last_run(settings),
    }


def _operation(use_case: PipelineConfig, settings: Settings) -> dict[str, Any]:
    """The newest drift result and the open release; nothing is made where no database is."""
    from tasks.control.retraining.ledger import Ledger
    from tasks.release.ledger import ReleaseLedger

    if settings.database_url is None and not settings.metadata_file.exists():
        return {"drift": None, "release": None}
    url, model = settings.metadata_url, use_case.registry.model_name
    stored = Ledger(url).newest_result(model, use_case.name)
    drift = stored and {
        "result": stored.evidence.result,
        "window": stored.evidence.window,
        "stored_at": stored.stored_at,
    }
    return {"drift": drift, "release": ReleaseLedger(url).open_release(model)}


def _last_run(settings: Settings) -> dict[str, Any] | None:
    folder = settings.latest_report()
    try:
        record = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    shown = {name: record.get(name) for name in ("run_id", "started")}
    return {**shown, "report": folder / "report.html"}


def _model_lines(facts: dict[str, Any]) -> Iterator[str]:
    from infra.platform.health import age

    yield row("Use case", f"{facts['use_case']}, model {facts['model']}")
    champion, candidate = facts["champion"], facts["candidate"]
    if champion is None:
        yield row("Champion", "none; `falaj run` trains and promotes a first one")
    else:
        since = facts["promoted_at"] or champion["created"]
        judged = f"{quality_text(champion)}, {age(since)} old"
        yield row("Champion", f"version {champion['version']}, {judged}")
    if candidate is not None and (champion is None or candidate["version"] != champion["version"]):
        yield row("Candidate", f"version {candidate['version']}, {quality_text(candidate)}")
    for version in facts["waits_for_approval"]:
        answer = f"falaj models approve {facts['model']} {version} --approver NAME"
        yield row("Approval", f"version {version} waits: {answer}")
    if drift := facts["drift"]:
        when = f"{age(drift['stored_at'])} ago"
        yield row("Drift", f"{drift['result']} in {drift['window']}, checked {when}")
    if release := facts["release"]:
        step = f"step {release.current.name}, {release.step + 1} of {len(release.steps)}"
        yield row("Release", f"version {release.candidate} (before: {release.stable}), {step}")
    if run := facts["last_run"]:
        yield row("Last run", f"{str(run['started'])[:16]}Z, {run['report']}")


def open_address(
    what: Literal["report", "ui", "docs", "data-docs", "catalogue"] = "report", /, *, context: Here
) -> Shown:
    """Open the report, the UI or the docs in a browser, and print where they are.

    Args:
        what: report: of the last run. ui: Prefect's, of the platform. docs: Falaj's own. data-docs:
            all validations. catalogue: of feature views.

    Raises:
        NotRunningError: the platform does not run.
        ArtifactError: it was not made yet.

    Examples:
        falaj open
        falaj open ui
    """
    address = str(ADDRESSES[what](context))
    can_open = sys.stdout.isatty() and not context.as_json
    if can_open and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & {*os.environ}):
        webbrowser.open(address if "://" in address else Path(address).as_uri())
    return Shown({what: address}, [address])


def _made(file: Path, how: str) -> Path:
    if not file.exists():
        raise ArtifactError(f"{file} does not exist yet; `falaj {how}` makes it")
    return file


def _ui(context: Context) -> str:
    address = platform_address(context.home, "ui_url")
    if address is None or not is_running(context.home):
        raise NotRunningError(
            f"no platform runs on {context.home}, so there is no UI; `falaj up` starts "
            "one, `falaj ui` shows the runs of the state folder"
        )
    return address


def _docs(context: Context) -> str:
    """Address of the documentation: of the checkout, else that which the distribution names."""
    if (PROJECT_ROOT / "docs").is_dir():
        return str(PROJECT_ROOT / "docs")
    named = metadata("falaj").get_all("Project-URL") or []
    urls = dict(str(line).split(", ", 1) for line in named)
    if "Documentation" not in urls:
        raise ArtifactError("this installation names no documentation; see `falaj --help`")
    return urls["Documentation"]


ADDRESSES: dict[str, Callable[[Context], object]] = {
    "report": lambda c: _made(c.settings.latest_report() / "report.html", "run"),
    "ui": _ui,
    "docs": _docs,
    "data-docs": lambda c: _made(c.home / "data_docs" / "current" / "index.html", "docs"),
    "catalogue": lambda c: _made(c.home / "catalogue" / "index.html", "catalogue"),
}


@config.command
def show(section: str = "", /, *, context: Here) -> Shown:
    """Show every effective value, and where it comes from. Secrets are never shown.

    Args:
        section: Beginning of names, such as settings, training or features.raw_tables.

    Raises:
        ConfigurationError: the use case cannot be read, or there is no such section.

    Examples:
        falaj config show settings
        falaj config show training --json
    """
    named = {name: value for name, value in os.environ.items() if name.startswith("FALAJ_")}
    settings = context.settings
    found = [*_settings_values(settings, named), *_use_case_values(settings.feature_repo)]
    shown = [
        (name, _open(value), source) for name, value, source in found if name.startswith(section)
    ]
    if not shown:
        sections = ", ".join(dict.fromkeys(name.partition(".")[0] for name, _, _ in found))
        raise ConfigurationError(f"no value is named {section}...; there is {sections}")
    facts = {name: {"value": value, "source": source} for name, value, source in shown}
    return Shown(facts, [f"{name} = {_text(value)}  ({source})" for name, value, source in shown])


Valued = tuple[str, Any, str]
"""Dotted name, value, where it comes from."""


def _settings_values(settings: Settings, named: dict[str, str]) -> Iterator[Valued]:
    values = {
        "home": (settings.home, "FALAJ_HOME"),
        "project": (settings.feature_repo, "FALAJ_FEATURE_REPO"),
        "profile": (settings.profile, "FALAJ_PROFILE"),
        "state": (settings.location.url if settings.location else settings.home, "FALAJ_STATE"),
        "database_url": (settings.metadata_url, "FALAJ_DATABASE_URL"),
        "leases": (settings.leases_path, "FALAJ_LEASES"),
        "encryption": (os.environ.get(ENCRYPTION, ""), ENCRYPTION),
    }
    for name, (value, variable) in values.items():
        option = {"home": "--home or ", "project": "--project or "}.get(name, "")
        yield f"settings.{name}", value, f"{option}{variable}" if variable in named else "default"
    known = {variable for _, variable in values.values()}
    for variable in sorted(named.keys() - known):
        value = HIDDEN if re.search("PASSWORD|SECRET|TOKEN|KEY", variable) else named[variable]
        yield f"settings.{variable}", value, "environment"


def _use_case_values(repo: Path) -> Iterator[Valued]:
    import yaml

    use_case = read_pipeline_config(repo)
    loader = yaml.SafeLoader((repo / USE_CASE_FILE).read_text("utf-8"))
    written = loader.get_single_node()
    lines = {name: node.start_mark.line + 1 for name, node in _leaves(_children, written)}
    for name, value in _leaves(_items, use_case.model_dump(mode="json")):
        line = lines.get(name)
        yield name, value, f"{USE_CASE_FILE}:{line}" if line else "default or derived"


def _leaves(inside: Any, value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of all that holds nothing further, by what lies `inside` a value."""
    parts = inside(value)
    if not parts:
        yield name, value
    for key, part in parts:
        yield from _leaves(inside, part, f"{name}.{key}" if name else str(key))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _children(node: Any) -> list[tuple[Any, Any]]:
    if node.id == "mapping":
        return [(key.value, value) for key, value in node.value]
    return list(enumerate(node.value)) if node.id == "sequence" else []


def _open(value: Any) -> Any:
    """A value without the passwords in its addresses."""
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, str):
        return value
    value = re.sub(r"(://[^:/@\s]*:)[^@\s]+@", rf"\1{HIDDEN}@", value)
    return re.sub(r"(?i)\b([a-z_]*(?:password|secret|token|key)=)[^&\s]+", rf"\1{HIDDEN}", value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def completion(shell: Literal["bash", "zsh", "fish"], /) -> Shown:
    """Print the completion of a shell; its own manual says where it belongs.

    Args:
        shell: Which.

    Examples:
        falaj completion bash > ~/.local/share/bash-completion/completions/falaj
    """
    from falaj.__main__ import app

    script = app.meta.generate_completion(prog_name="falaj", shell=shell)
    return Shown({shell: script}, script.splitlines())
