"""The command line as a whole: every command can be described, and a wrong word is exit code 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

from falaj.__main__ import COMMANDS, main
from tasks.kernel.settings import PROJECT_ROOT

NAMES = [name for commands in COMMANDS.values() for name in commands if name != "serve"]
HEAVY = ("prefect", "feast", "torch", "mlflow", "pandas", "sqlalchemy", "great_expectations")


@pytest.mark.parametrize("name", NAMES)
def test_every_command_shows_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "Options of all commands" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["audit", "--nonsense"],
        ["search", "--trials", "0"],
        ["features", "refresh", "yesterday", "today"],
        ["features", "refresh", "2013-01-02T05:00Z", "2013-01-01T05:00Z"],
        ["features", "refresh", "2013-01-01T05:00", "2013-01-02T05:00"],
        ["drift", "2013-01-01T05:00Z"],
        ["drift"],
        ["models", "approve", "flight-delay", "first", "--approver", "Ana"],
        ["models", "approve", "flight-delay", "1"],
        ["decisions", "--action", "dance"],
        ["compress", "--method", "zip"],
        ["decisions", "--limit", "0"],
        ["keys", "create", "--subject", "x", "--role", "nonsense"],
        ["keys", "create", "--subject", " ", "--role", "infer:m"],
        ["keys", "create", "--subject", "x", "--role", "infer:m", "--days", "nan"],
        ["keys", "create", "--subject", "x", "--role", "infer:m", "--days", "-3"],
        ["up", "--port", "many"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_and_starts_nothing(
    words: list[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HOME", f"{tmp_path}/home")
    assert main(words) == 2


def test_help_imports_no_heavy_library() -> None:
    program = (
        "import sys; from falaj.__main__ import main; main(['--help']); "
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.strip() == "[]"
