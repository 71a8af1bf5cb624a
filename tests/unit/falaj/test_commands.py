"""The command line as a whole: every command can be described, and a wrong word is exit code 2."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from falaj import session
from falaj.__main__ import COMMANDS, main
from falaj.context import EXIT_DATA
from flows import feature_refresh, pipeline
from flows.config import read_pipeline_config
from tasks.features.checks.report import ParityReport, ViewParity
from tasks.kernel.errors import FeatureStoreError
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import run_python

NAMES = [name for commands in COMMANDS.values() for name in commands if name != "serve"]
HEAVY = (
    "prefect feast torch mlflow pandas sqlalchemy great_expectations duckdb pydantic numpy pyarrow "
    "polars fastapi"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_shows_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "Options of all commands" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "nonsense",
        "audit --nonsense",
        "audit",  # there is no state folder
        "audit --last 0",
        "search --trials 0",
        "features refresh yesterday today",
        "features refresh 2013-01-02T05:00Z 2013-01-01T05:00Z",
        "features refresh 2013-01-01T05:00 2013-01-02T05:00",
        "drift 2013-01-01T05:00Z",
        "drift",
        "models approve flight-delay first --approver Ana",
        "decisions --action dance",
        "compress --method zip",
        "decisions --limit 0",
        "decisions --since yesterday",
        "keys create --subject x --role nonsense",
        "keys create --subject x --role infer:m --days nan",
        "keys create --subject x --role infer:m --days -3",
        "up --port many",
    ],
)
def test_wrong_usage_is_exit_code_2_and_starts_nothing(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    assert main(words.split()) == 2
    assert not (tmp_path / "home").exists()


def test_a_faulty_description_of_an_import_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, file = tmp_path / "home", tmp_path / "digits.yaml"
    file.write_text("program: {file: x}")
    assert main(["--home", str(home), "import", str(file)]) == 2
    assert "digits.yaml" in capsys.readouterr().err
    assert not home.exists()


def test_help_imports_no_heavy_library() -> None:
    program = (
        "import sys; from falaj.__main__ import main; main(['--help']); "
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = run_python("-c", program)
    assert done.stderr.strip() == "[]"


def report(differing: int) -> ParityReport:
    view = ViewParity(
        view="weather",
        watermark=datetime(2013, 1, 5, tzinfo=UTC),
        num_entities=3,
        num_values=27,
        num_differing=differing,
        **dict.fromkeys(("num_null", "num_stale", "num_overtaken"), 0),
    )
    return ParityReport(
        feature_service="service",
        tables_version="0" * 32,
        seed=0,
        views=(view,),
        examples=(),
        result="different" if differing else "equal",
        evidence=("feature view weather: 1 of 27 values differ",) if differing else (),
    )


@pytest.mark.parametrize("differing", [0, 1])
def test_where_online_differs_from_offline_the_command_and_the_loop_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], differing: int
) -> None:
    config = read_pipeline_config(PROJECT_ROOT / "feature_repo" / "flights")

    def run(context: Any, work: Any) -> list[str]:
        lines: list[str] = work(config)
        return lines

    def checked(config: object) -> ParityReport:
        return report(differing)

    checked.fn = checked  # type: ignore[attr-defined]  # as a flow has it, without a server
    for module in (feature_refresh, pipeline):
        monkeypatch.setattr(module, "parity_check_flow", checked)
    monkeypatch.setattr(session, "run_flow", run)
    assert main(["features", "parity"]) == differing
    said = capsys.readouterr()
    if differing:
        assert "weather: 1 of 27 values differ" in said.err
        with pytest.raises(FeatureStoreError, match="weather: 1 of 27 values differ"):
            pipeline.check_online(config)
    else:
        assert "27 values of 3" in said.out
        pipeline.check_online(config)


@pytest.mark.parametrize("trace", ["feast/applied.json", "keyring/journal/a.pub"])
def test_a_journal_that_was_removed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    arguments = ["--home", str(tmp_path), "audit", "verify"]
    assert main(arguments) == 0
    assert "0 lines" in capsys.readouterr().out
    (tmp_path / trace).parent.mkdir(parents=True)
    (tmp_path / trace).write_text("{}")
    assert main(arguments) == EXIT_DATA
    assert f"the journal in {tmp_path / 'audit'} is gone" in capsys.readouterr().err
