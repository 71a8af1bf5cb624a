"""Every measurement of the bench on little data: all its figures are there, and are numbers."""

import os
from pathlib import Path

import pytest

from infra.bench.parts import MEASUREMENTS, ON_DEVICE, Measurement
from infra.bench.results import devices_in_words, read_results
from infra.bench.running import LoopState
from tests.support.host.processes import run_python

LIMIT_S = 800
NUM_FIGURES = {
    "loop/whole": 7,
    "features/retrieval": 5,
    "features/materialization": 4,
    "features/online_read": 4,
    "features/false_alarms": 2,
    "features/drift_check": 2,
    "training/launch": 1,
    "training/reading": 2,
    "training/compression": 8,
    "training/checkpoints": 3,
    "training/step_clock": 1,
    "conversion/tabular": 2,
    "serving/edge": 1,
    "serving/prediction_log": 3,
    "serving/entities": 1,
    "serving/release": 7,
    "serving/roll_back": 1,
}
"""With those that a host leaves out, and says why; of the others only that there are some."""
MAY_BE_LEFT_OUT = (
    "mlserver",
    "kserve",
    "Evidently",
    "evidently",
    "nannyml",
    "river",
    "Spark",
    "bf16",
    "cut link",
    "joining host",
)
MUST_BE_ZERO = ("differ", "lost or wrong", "neither logged nor counted", "contradicts")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that name the state folder of a finished small loop, and its use case."""
    folder = tmp_path_factory.mktemp("bench") / "loop"
    return LoopState(folder, None, small=True).environment(MEASUREMENTS[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda each: each.title)
def test_a_measurement_gives_all_its_figures(
    measurement: Measurement, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if measurement.part in ON_DEVICE and not devices_in_words():
        pytest.skip("this machine has no NVIDIA device")
    told = request.getfixturevalue("loop") if measurement.reads_loop else {}
    words = ["-m", "infra.bench", measurement.title, "--small", "--results", str(tmp_path)]
    words += ["--home", told["FALAJ_HOME"]] if told else []
    done = run_python(*words, env={**os.environ, **told}, timeout=LIMIT_S)
    result = read_results(tmp_path, measurement.part)[measurement.name]
    assert result.failure is None, done.stderr[-6000:]
    assert result.figures, result.measured
    expected = NUM_FIGURES.get(measurement.title, len(result.measured))
    assert len(result.measured) == expected, result.measured
    assert all(figure.value is not None for figure in result.figures), result.figures
    for one in result.measured:
        if one not in result.figures:
            assert any(word in one.name for word in MAY_BE_LEFT_OUT), one
    wrong = [f for f in result.figures if f.value and any(w in f.name for w in MUST_BE_ZERO)]
    assert wrong == []
    assert result.small
    assert done.returncode == (0 if result.holds else 1)
    assert f"| {result.figures[0].name} |" in (tmp_path / f"{measurement.part}.md").read_text()
