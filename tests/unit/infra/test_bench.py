"""The bench: what it measures, what becomes of results, and that a failure stops nothing else."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest

from infra.bench import __main__ as command
from infra.bench.figures import Figure, LeftOut, at_least, at_most, reported
from infra.bench.parts import MEASUREMENTS, PARTS, Bench, Measurement, chosen
from infra.bench.results import Result, page, read_results, this_host, write_result
from infra.bench.running import LONGEST_REASON, LoopState, MeasurementError, Runner, own_environment
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
    ("figure", "holds", "bound"),
    [
        (at_most("f", 1, 1, ""), True, "<= 1"),
        (at_most("f", 1.1, 1, ""), False, "<= 1"),
        (at_least("f", 0.9, 1, ""), False, ">= 1"),
        (at_least("f", 1, 1, ""), True, ">= 1"),
        (at_most("f", -math.inf, 1, ""), False, "<= 1"),
        (at_least("f", math.inf, 1, ""), False, ">= 1"),
        (reported("f", 3, ""), True, ""),
        (reported("f", math.nan, ""), False, ""),
    ],
)
def test_a_figure_holds_where_it_is_a_number_within_its_bound(
    figure: Figure, holds: bool, bound: str
) -> None:
    assert (figure.holds, figure.bound_text) == (holds, bound)


def test_parts_and_single_measurements_can_be_chosen() -> None:
    assert chosen([]) == MEASUREMENTS
    (one,) = chosen(["training/launch"])
    assert (one.part, one.name) == ("training", "launch")
    titles = [each.title for each in chosen(["operation", "serving/edge"])]
    assert titles == [
        "serving/edge",
        *(f"operation/{n}" for n in ("platform", "leases", "retraining", "routing")),
    ]
    with pytest.raises(ValueError, match="no part opration; there are"):
        chosen(["opration"])


def test_every_module_with_figures_is_measured_and_every_measurement_has_one() -> None:
    found = set()
    for file in (PROJECT_ROOT / "infra" / "bench").glob("*/*.py"):
        defined = ast.parse(file.read_text()).body
        if any(isinstance(node, ast.FunctionDef) and node.name == "figures" for node in defined):
            found.add(".".join(file.relative_to(PROJECT_ROOT).with_suffix("").parts))
    assert found == {each.module for each in MEASUREMENTS}
    assert all(find_spec(module) for module in found)


def test_results_are_read_as_they_were_written_and_kept_in_order(tmp_path: Path) -> None:
    left_out = LeftOut("another", "there is no such device")
    written = result(measured=(FIGURE, left_out))
    failed = result(measured=(), failure="BinderException: no column")
    write_result(tmp_path, "features", "online_read", failed)
    write_result(tmp_path, "features", "retrieval", written)
    assert read_results(tmp_path, "features") == {"retrieval": written, "online_read": failed}
    assert list(read_results(tmp_path, "features")) == ["retrieval", "online_read"]
    assert read_results(tmp_path, "training") == {}
    assert not failed.holds
    assert written.holds


def test_a_page_says_what_was_measured_on_what(tmp_path: Path) -> None:
    write_result(tmp_path, "features", "retrieval", result())
    told = (tmp_path / "features.md").read_text()
    assert "| a figure \\| of two | 0.500 | <= 1 | yes | what was seen |" in told
    for fact in (COMMIT, "2026-01-02 03:04 UTC", str(this_host()), "load 0.5 before, 1.5 after"):
        assert fact in told
    assert "small" not in told
    small = page("features", {"retrieval": result(small=True, failure="out of memory")})
    assert "On small data" in small
    assert "**Failed:** out of memory" in small


def test_damaged_results_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "features.json").write_text("{")
    assert command.main(["features", "--results", str(tmp_path)]) == command.WRONG_USAGE
    assert "features.json is damaged" in capsys.readouterr().err
    assert command.main(["feature", "--results", str(tmp_path)]) == command.WRONG_USAGE


def runner(tmp_path: Path, commit: str = COMMIT) -> Runner:
    return Runner(tmp_path, LoopState(tmp_path / "loop", None, False), False, commit)


@pytest.mark.parametrize(
    ("changes", "commit", "is_done"),
    [
        ({}, COMMIT, True),
        ({}, "9f9f9f9", False),
        ({"small": True}, COMMIT, False),
        ({"failure": "it failed"}, COMMIT, False),
        ({"commit": f"{COMMIT}-dirty"}, f"{COMMIT}-dirty", False),
        ({"commit": ""}, "", False),
    ],
)
def test_only_a_result_of_the_same_commit_is_kept(
    tmp_path: Path, changes: dict[str, object], commit: str, is_done: bool
) -> None:
    assert runner(tmp_path, commit).is_done(result(**changes)) is is_done
    assert not runner(tmp_path, commit).is_done(None)


def test_one_failure_is_written_down_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(self: Runner, measurement: Measurement, environment: object) -> list[Figure]:
        if measurement.name == "leases":
            raise MeasurementError(
                f"KeyError: 'x' in {self.scratch}/a and {PROJECT_ROOT}/b"
                + " y" * 999
                + " the cause"
            )
        return [replace(FIGURE, name=measurement.name)]

    monkeypatch.setattr(Runner, "_measured", measured)
    assert command.main(["operation", "--results", str(tmp_path)]) == 1
    results = read_results(tmp_path, "operation")
    assert list(results) == ["platform", "leases", "retraining", "routing"]
    failure = results["leases"].failure
    assert failure is not None
    assert failure.startswith("KeyError: 'x' in SCRATCH/a and ./b")
    assert failure.endswith(" y the cause")
    assert len(failure) < LONGEST_REASON
    assert [name for name, each in results.items() if each.holds] == [
        "platform",
        "retraining",
        "routing",
    ]
    said = capsys.readouterr()
    assert "4 of 4: operation/routing" in said.err
    assert "FAIL  KeyError" in said.out


def test_a_loop_that_fails_is_run_once_and_fails_what_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Path] = []

    def failing(self: LoopState, home: Path, told: dict[str, str]) -> None:
        runs.append(home)
        self._failure = "the loop failed"

    monkeypatch.setattr(LoopState, "_run", failing)
    one = runner(tmp_path)
    readers = [each for each in MEASUREMENTS if each.reads_loop]
    assert {one.measure(each).failure for each in readers} == {"the loop failed"}
    assert len(runs) == 1


def test_a_measurement_reads_the_state_folder_that_was_given(tmp_path: Path) -> None:
    home = tmp_path / "home"
    loop = LoopState(tmp_path / "loop", home, small=True)
    (reading,) = chosen(["training/reading"])
    (strategies,) = chosen(["training/strategies"])
    assert loop.environment(reading) == {"FALAJ_HOME": str(home)}
    assert loop.environment(strategies) == {}


def test_nobodys_installation_is_measured_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ("FALAJ_FEATURE_REPO", "FALAJ_KSERVE_PYTHON", "OMP_NUM_THREADS")
    others = ("FALAJ_HOME", "FALAJ_DATABASE_URL", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")
    for name in (*kept, *others):
        monkeypatch.setenv(name, "of somebody")
    assert set(own_environment()) & {*kept, *others} == set(kept)


def test_sizes_are_small_where_asked(tmp_path: Path) -> None:
    assert [Bench(tmp_path, small=small).size(9, 1) for small in (False, True)] == [9, 1]
    assert set(PARTS) == {"loop", "features", "training", "conversion", "serving", "operation"}
