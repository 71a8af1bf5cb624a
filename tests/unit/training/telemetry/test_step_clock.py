from pathlib import Path

import pytest

from tasks.kernel.errors import StorageError
from tasks.training.telemetry import step_clock
from tasks.training.telemetry.step_clock import WARM_UP_STEPS, StepClock, clock_path, read_clocks
from tests.support.host.processes import wait_until

NEVER_S = 3600.0


class HandTurnedTime:
    """Stands in for `time` in the clock: it only moves when it is told to."""

    def __init__(self) -> None:
        self.ms = 0.0

    def perf_counter_ns(self) -> int:
        return int(self.ms * 1e6)

    def thread_time_ns(self) -> int:
        return 0

    def process_time(self) -> float:
        return 0.0


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> HandTurnedTime:
    turned = HandTurnedTime()
    monkeypatch.setattr(step_clock, "time", turned)
    return turned


def test_a_phase_inside_another_takes_its_time_from_it(
    tmp_path: Path, turned: HandTurnedTime
) -> None:
    with StepClock(tmp_path, 0, NEVER_S) as clock:
        with clock.phase("compute"):
            turned.ms += 1
            with clock.phase("exchange"):
                turned.ms += 20
            turned.ms += 2
        turned.ms += 5
        phases = clock.reading().phases
    assert phases["exchange"].seconds == pytest.approx(0.020)
    assert phases["compute"].seconds == pytest.approx(0.003)
    assert phases["other"].seconds == pytest.approx(0.005)


def test_the_first_steps_are_not_part_of_the_steady_time(
    tmp_path: Path, turned: HandTurnedTime
) -> None:
    with StepClock(tmp_path, 0, NEVER_S) as clock:
        for number in range(WARM_UP_STEPS + 2):
            with clock.phase("compute"):
                turned.ms += 1000 if number == 0 else 8
            clock.add_rows(7)
            clock.step()
        reading = clock.reading()
    assert reading.rows_per_s == pytest.approx(14 / 0.016)
    assert reading.num_rows == 7 * (WARM_UP_STEPS + 2)
    compute = reading.phases["compute"]
    assert compute.steady_s == pytest.approx(0.016)
    assert compute.seconds == pytest.approx(1.0 + 0.008 * (WARM_UP_STEPS + 1))
    assert reading.step_p50_s == reading.step_p95_s == pytest.approx(0.008)


def test_the_driver_reads_what_a_rank_wrote_last(tmp_path: Path) -> None:
    assert read_clocks(tmp_path) == []
    with StepClock(tmp_path, 3, NEVER_S) as clock:
        wait_until(clock_path(tmp_path, 3).exists, "the first reading is written at once")
        clock.add_bytes(12)
        clock.step()
    [reading] = read_clocks(tmp_path)
    assert (reading.rank, reading.num_steps, reading.wire_bytes) == (3, 1, 12)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["telemetry-00003.json"]


def test_a_rank_that_is_stuck_says_in_which_phase(tmp_path: Path) -> None:
    def says_exchange() -> bool:
        return any(seen.phases["exchange"].seconds > 0.1 for seen in read_clocks(tmp_path))

    with StepClock(tmp_path, 0, write_every_s=0.05) as clock, clock.phase("exchange"):
        wait_until(says_exchange, "the running phase is written")
        [reading] = read_clocks(tmp_path)
    assert reading.phase == "exchange"


def test_a_disk_that_refuses_is_told_by_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", lambda *_: Path("/dev/full").write_text("x"))
    clock = StepClock(tmp_path, 0, write_every_s=0.02)

    def refused() -> bool:
        try:
            clock.step()
        except StorageError:
            return True
        return False

    wait_until(refused, "a step raises what the writing thread met")
    with pytest.raises(StorageError, match="No space left"):
        clock.close()
