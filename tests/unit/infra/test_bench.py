"""The bench: what it measures, what becomes of results, and that a failure stops nothing else."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from infra.bench import __main__ as command
from infra.bench.figures import Figure, LeftOut, at_least, at_most, reported
from infra.bench.parts import MEASUREMENTS, ON_DEVICE, Measurement, chosen
from infra.bench.results import Result, page, read_results, this_host, write_result
from infra.bench.running import MeasurementError, Runner, own_environment
from tasks.kernel.settings import PROJECT_ROOT

COMMIT = "1a2b3c4"
FIGURE = at_most("a figure | of two", 0.5, 1, "what was seen")


def result(**changes: object) -> Result:
    fields = {
        "commit": COMMIT,
        "date": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "host": this_host(),
        "load": (0.5, 1.5),
        "seconds": 60.0,
        "small": False,
        "measured": (FIGURE,),
    }
    return Result.model_validate({**fields, **changes})


@pytest.mark.parametrize(
    ("figure", "holds"),
    [
        (at_most("f", 1, 1, ""), True),
        (at_most("f", 1.1, 1, ""), False),
        (at_least("f", 0.9, 1, ""), False),
        (at_least("f", 1, 1, ""), True),
        (at_most("f", -math.inf, 1, ""), False),
        (at_least("f", math.inf, 1, ""), False),
        (reported("f", 3, ""), True),
        (reported("f", math.nan, ""), False),
    ],
)
def test_a_figure_holds_where_it_is_a_number_within_its_bound(figure: Figure, holds: bool) -> None:
    assert figure.holds is holds


def test_results_are_read_as_they_were_written_and_a_page_says_what_was_measured_on_what(
    tmp_path: Path,
) -> None:
    written = result(measured=(FIGURE, LeftOut("another", "there is no such device")))
    failed = result(measured=(), failure="BinderException: no column")
    write_result(tmp_path, "features", "online_read", failed)
    write_result(tmp_path, "features", "retrieval", written)
    kept = read_results(tmp_path, "features")
    assert list(kept.items()) == [("retrieval", written), ("online_read", failed)]
    assert read_results(tmp_path, "training") == {}
    assert not failed.holds
    assert written.holds
    told = (tmp_path / "features.md").read_text()
    assert "| a figure \\| of two | 0.500 | <= 1 | yes | what was seen |" in told
    for fact in (COMMIT, "2026-01-02 03:04 UTC", str(this_host()), "load 0.5 before, 1.5 after"):
        assert fact in told
    assert "**Failed:** BinderException" in told
    assert "On small data" in page("features", {"retrieval": result(small=True)})


def test_damaged_results_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "features.json").write_text("{")
    for part in ("features", "feature"):
        assert command.main([part, "--results", str(tmp_path)]) == command.WRONG_USAGE


def test_one_failure_is_written_down_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(self: Runner, measurement: Measurement, environment: object) -> list[Figure]:
        if measurement.name == "leases":
            raise MeasurementError(f"KeyError: 'x' in {self.scratch}/a and {PROJECT_ROOT}/b")
        return [replace(FIGURE, name=measurement.name)]

    monkeypatch.setattr(Runner, "_measured", measured)
    words = ["operation", "--results", str(tmp_path), "--home", str(tmp_path)]
    assert command.main([*words[:-1], str(tmp_path / "none")]) == command.WRONG_USAGE
    assert command.main(words) == 1
    results = read_results(tmp_path, "operation")
    assert list(results) == [each.name for each in MEASUREMENTS if each.part == "operation"]
    assert results["leases"].failure == "KeyError: 'x' in SCRATCH/a and ./b"
    assert [name for name, each in results.items() if not each.holds] == ["leases"]


def test_what_needs_a_device_is_measured_where_it_is_named_and_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = chosen(["gpu"])
    assert {each.part for each in named} == ON_DEVICE
    assert set(chosen([])) == set(MEASUREMENTS) - set(named)
    monkeypatch.setattr(command, "devices_in_words", str)  # there is none
    assert command.main(["gpu", "--results", str(tmp_path)]) == command.WRONG_USAGE
    assert "this machine shows none; nothing was measured" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_host_tells_its_devices_where_it_has_some() -> None:
    host = this_host().model_copy(update={"devices": ""})
    assert str(host).endswith(f"Python {host.python}")
    told = str(host.model_copy(update={"devices": "NVIDIA H100, driver 580"}))
    assert told == f"{host}; NVIDIA H100, driver 580"


def test_nobodys_installation_is_measured_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ("FALAJ_FEATURE_REPO", "FALAJ_KSERVE_PYTHON", "OMP_NUM_THREADS")
    others = ("FALAJ_HOME", "FALAJ_DATABASE_URL", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")
    for name in (*kept, *others):
        monkeypatch.setenv(name, "of somebody")
    assert set(own_environment()) & {*kept, *others} == set(kept)
