"""What all commands share: JSON, exit codes, windows, questions, dry runs, examples."""

import inspect
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclopts import App

from falaj import context, loop
from falaj.__main__ import CODES, COMMANDS, app, main
from falaj.context import Context, Shown, chosen_window, show
from flows import drift_check, pipeline
from flows.config import read_pipeline_config
from serving.__main__ import _parser
from tasks.contracts.clock import ClockConfig
from tasks.contracts.drift import DriftResult
from tasks.contracts.release import GateResult
from tasks.kernel.errors import ConfigurationError, WindowError
from tasks.kernel.settings import PROJECT_ROOT, Settings
from tests.support.control import builders
from tests.support.reporting.run_records import run_record

FLIGHTS = PROJECT_ROOT / "feature_repo" / "flights"
NOW = datetime(2026, 3, 10, 7, 45, tzinfo=UTC)
SHOWN = [
    "status",
    "config show",
    "config show settings",
    "models list",
    "decisions",
    "audit",
    "predictions counts --last 7d",
    "keys list",
    "doctor",
    "down --dry-run",
    "open docs",
    "gateway settings",
    "features refresh --last 48h --dry-run",
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of commands of this process; what they put into the environment is taken out again."""
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    for name in ("FALAJ_FEATURE_REPO", "FALAJ_DATABASE_URL", "PREFECT_API_URL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path / "home"


def leaves(group: App = app, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    for name in group:
        if not name.startswith("-"):
            command = group[name]
            words = (*path, name)
            if command.default_command is not None:
                yield " ".join(words), command.default_command
            yield from leaves(command, words)


ALL = dict(leaves())


@pytest.mark.parametrize("words", ALL)
def test_every_command_has_examples_and_each_can_be_typed(words: str) -> None:
    found = re.findall(r"^\s+falaj (.+)$", ALL[words].__doc__ or "", re.MULTILINE)
    assert found, "its docstring ends with `Examples:`"
    for line in found:
        tokens = shlex.split(line.partition(" > ")[0])
        assert tokens[: len(words.split())] == words.split()
        _, bound, _ = app.meta.parse_args(tokens, exit_on_error=False, print_error=False)
        command, _, _ = app.parse_args(bound.args, exit_on_error=False, print_error=False)
        assert command is ALL[words]


def test_a_help_ends_with_the_examples_and_has_common_options_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--home", "x", "drift", "--help"]) == 0
    said = capsys.readouterr().out
    own, common = said.index("--exit-code"), said.index("Options of all commands")
    assert own < common < said.index("--on-platform")
    assert said.rstrip().endswith("falaj drift --served")


@pytest.mark.parametrize("words", SHOWN)
def test_what_a_command_shows_is_one_json_document(
    words: str, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    home.mkdir()
    main([*words.split(), "--json"])
    assert json.loads(capsys.readouterr().out) is not None
    main(words.split())
    assert capsys.readouterr().out.strip()


def test_lines_alone_are_a_document_too_and_what_is_no_number_is_null(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert show(["one", "two"], as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"lines": ["one", "two"]}
    assert show(Shown({"value": float("nan"), "at": NOW}, code=6), as_json=True) == 6
    assert json.loads(capsys.readouterr().out) == {"value": None, "at": "2026-03-10T07:45:00Z"}


@pytest.mark.parametrize(
    ("kind", "code"), [*CODES.items(), (WindowError, 4)], ids=lambda each: str(each)
)
def test_each_kind_of_error_has_its_exit_code(
    kind: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise kind("seen")

    monkeypatch.setattr(loop, "run_flow", fail)
    assert main(["train"]) == code


def at_once(context: Any, work: Any, **_: Any) -> Any:
    return work(read_pipeline_config(FLIGHTS))


@pytest.mark.parametrize(
    ("result", "options", "code"),
    [
        (DriftResult.STABLE, ["--exit-code"], 0),
        (DriftResult.WATCH, ["--exit-code"], 6),
        (DriftResult.RETRAIN, ["--exit-code"], 6),
        (DriftResult.RETRAIN, [], 0),
    ],
)
def test_drift_is_told_by_the_exit_code_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: DriftResult,
    options: list[str],
    code: int,
) -> None:
    report = builders.report().model_copy(update={"result": result})
    windows = []

    def check(window: Any, config: Any) -> Any:
        windows.append(window)
        return report

    monkeypatch.setattr(loop, "run_flow", at_once)
    monkeypatch.setattr(drift_check, "drift_check_flow", check)
    assert main(["drift", "--last", "28d", "--json", *options]) == code
    assert json.loads(capsys.readouterr().out)["result"] == result
    (window,) = windows
    assert window.end.year == 2013  # as the use case's clock shows
    assert window.end - window.start == timedelta(days=28)


@pytest.mark.parametrize(("options", "code"), [(["--exit-code"], 5), ([], 0)])
def test_a_refusal_is_told_by_the_exit_code_where_that_is_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
) -> None:
    record = run_record(Settings(tmp_path, FLIGHTS).store)
    closed = GateResult(name="auc-floor", passed=False, evidence="0.55")
    refused = record.promotion.model_copy(update={"gates": (closed,), "promoted": False})
    record = record.model_copy(update={"promotion": refused})
    monkeypatch.setattr(loop, "run_flow", at_once)
    monkeypatch.setattr(pipeline, "pipeline_flow", lambda config: record)
    assert main(["run", *options]) == code
    assert "refused by gate auc-floor" in capsys.readouterr().out


def test_the_newest_so_long_is_by_the_clock_of_the_use_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moment = SimpleNamespace(now=lambda zone: NOW)
    monkeypatch.setattr(context, "datetime", moment)
    day, clock = timedelta(days=1), ClockConfig(replay_year=2013, label_hours=48)
    now = chosen_window(None, None, day)
    assert now
    assert (now.start, now.end) == (NOW - day, NOW)
    data = chosen_window(None, None, day, clock)
    assert data
    assert data.end == datetime(2013, 3, 10, 7, tzinfo=UTC)
    labelled = chosen_window(None, None, day, clock, labelled=True)
    assert labelled
    assert labelled.end == datetime(2013, 3, 8, 7, tzinfo=UTC)
    assert chosen_window(None, None, None) is None
    for wrong in ((NOW, None, None), (NOW, NOW + day, day), (None, None, -day)):
        with pytest.raises(ConfigurationError):
            chosen_window(*wrong)


def test_what_cannot_be_undone_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["erase", "--entity", "subject=ana"]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert not home.exists()
    assert main(["erase", "--entity", "subject=ana", "--yes"]) == 0
    assert main(["erase", "--entity", "nothing=1", "--yes"]) == 2  # no table has it: no certificate
    assert "such as subject" in capsys.readouterr().err
    assert len([*(home / "erasures").glob("2*.json")]) == 1
    terminal = io.StringIO("no\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["erase", "--entity", "subject=ana"]) == 130
    assert "not confirmed" in capsys.readouterr().err


def test_a_dry_run_changes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["erase", "--entity", "subject=ana", "--dry-run"]) == 0
    assert not home.exists()
    assert main(["keys", "create", "--subject", "shop", "--role", "read:*", "--json"]) == 0
    made = json.loads(capsys.readouterr().out.partition("Nothing was changed\n")[2])
    file = home / "serving" / "secrets" / "api-keys.json"
    before = file.read_bytes()
    assert main(["keys", "revoke", made["id"], "--dry-run"]) == 0
    assert main(["keys", "revoke", "nobody", "--dry-run"]) == 2
    assert file.read_bytes() == before
    capsys.readouterr()
    assert main(["keys", "list", "--json"]) == 0
    (key,) = json.loads(capsys.readouterr().out)
    assert key["state"] == "valid"
    assert "digest" not in key


def test_the_config_tells_where_each_value_comes_from_and_hides_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    monkeypatch.setenv("FALAJ_DATABASE_URL", "postgresql+psycopg://me:hunter2@db/falaj")
    monkeypatch.setenv("FALAJ_SOME_TOKEN", "hunter2")
    assert main(["config", "show"]) == 0
    said = capsys.readouterr().out
    assert "hunter2" not in said
    assert "settings.database_url = postgresql+psycopg://me:***@db/falaj  (FALAJ_DATABASE" in said
    assert f"settings.home = {home}  (--home or FALAJ_HOME)" in said
    lines = (FLIGHTS / "use_case.yaml").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.startswith("name:"))
    assert f"name = flights  (use_case.yaml:{number})" in said
    assert "training.strategy.name = horovod  (default or derived)" in said
    assert main(["config", "show", "nothing"]) == 2
    assert "there is settings, name, question" in capsys.readouterr().err


def test_the_status_names_what_is_missing_and_misses_no_platform_that_never_was(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "Champion  none;" in said
    assert "No platform runs" in said
    assert not home.exists()
    (home / "platform").mkdir(parents=True)
    (home / "platform" / "config.json").write_text("{}")
    assert main(["status"]) == 3


def test_a_completion_knows_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert {"status", "predictions", "label", "--project", "--last"} <= set(
        re.findall(r"[\w-]+", script)
    )


@pytest.mark.parametrize(("what", "code"), [("report", 1), ("ui", 3), ("data-docs", 1)])
def test_what_is_not_there_is_not_opened(what: str, code: int) -> None:
    assert main(["open", what]) == code


def test_serve_has_the_options_of_the_process_that_it_becomes() -> None:
    signature = inspect.signature(app["serve"].default_command)
    own = {f"--{name.replace('_', '-')}" for name in signature.parameters if name != "context"}
    process = {name for action in _parser()._actions for name in action.option_strings}
    of_one_of_several = {"--replica", "--drain-s"}
    assert (
        own - {"--replicas"}
        == process - {"-h", "--help", "--home", "--timeout-s"} - of_one_of_several
    )


def test_details_are_logged_and_an_error_has_its_origin_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HANDLERS_CONSOLE", *(f"LOGGERS_{logger}" for logger in context.LOGGERS)):
        monkeypatch.setenv(f"PREFECT_LOGGING_{name}_LEVEL", "")
    assert main(["drift", "-q"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["-v", "drift"]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert main(["-v", "-q", "drift"]) == 2


def test_the_commands_of_every_day_come_first() -> None:
    assert next(iter(COMMANDS)) == "Every day"
    assert Context(Settings(Path("home"), FLIGHTS)).home == Path("home")


def test_an_encrypted_state_opens_no_address_without_tls(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGSSLMINPROTOCOLVERSION", "")  # taken out again
    monkeypatch.delenv("PGSSLMINPROTOCOLVERSION")
    monkeypatch.setenv("FALAJ_DATABASE_URL", "postgresql://db.example.org/d")
    keys = home.parent / "keys"
    assert main(["encryption", "enable", "--keys", keys.as_uri()]) == 2
    assert "FALAJ_DATABASE_URL" in capsys.readouterr().err
    assert not keys.exists()
    monkeypatch.setenv("FALAJ_ENCRYPTION", "state")
    monkeypatch.setenv("FALAJ_HOME", "/proc")  # a mount, into which nothing can be written
    with pytest.raises(ConfigurationError, match="FALAJ_DATABASE_URL"):
        _ = Context().target
    monkeypatch.setenv("FALAJ_DATABASE_URL", "postgresql://db.example.org/d?sslmode=verify-full")
    assert Context().target.home == Path("/proc")
    assert os.environ["PGSSLMINPROTOCOLVERSION"] == "TLSv1.3"
