"""The probe's measurement: candidates take the same steps in turns, while the others wait."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.errors import TransientError
from tasks.training.launch.nursery import Nursery
from tasks.training.launch.probe_job import JOB_FILE, SAYS, TURN_FILE, Layout, ProbeJob
from tasks.training.launch.rank_group import RankGroup, RankSpec

LOGGER = logging.getLogger(__name__)
PROBE_MODULE = "tasks.training.launch.probe_rank"
TURN_S = 0.2
MAX_ROUNDS = 9
CALIBRATION_STEPS = 2
# A rank that is started, not forked, imports PyTorch first, on a machine that may be busy.
ANSWER_WITHIN_S = 120.0
POLL_S = 0.05
STALL_WARNING_S, STALL_SHUTDOWN_S = 30, 60
NUM_LINES_KEPT = 3


class Contender:
    """The living ranks of one candidate.

    Args:
        folder: its run directory.
        ranks: its ranks, running `probe_rank`.
    """

    def __init__(self, folder: Path, ranks: RankGroup) -> None:
        self._folder = folder
        self._ranks = ranks
        self._num_turns = 0
        self._lines: list[str] = []
        self.step_s = 0.0
        self.step_times: list[float] = []

    def calibrate(self) -> None:
        """Take the first steps, which make what is made once, then learn how long one takes."""
        self._take(CALIBRATION_STEPS)
        self.step_s = self._take(CALIBRATION_STEPS)

    def take_turn(self) -> None:
        """Take steps for about the time of a turn, and remember how long one took."""
        self.step_times.append(self._take(self._steps_of_a_turn))

    @property
    def turn_s(self) -> float:
        """How long a turn will take."""
        return self._steps_of_a_turn * self.step_s

    @property
    def _steps_of_a_turn(self) -> int:
        return max(1, round(TURN_S / self.step_s))

    def _take(self, num_steps: int) -> float:
        """Seconds of a step.

        Raises:
            TransientError: a rank ended, or none answered.
        """
        self._ask(num_steps)
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while time.monotonic() < deadline and self._ranks.has_output:
            for _, line in self._ranks.read_lines(POLL_S):
                if line.startswith(SAYS):
                    return float(line.removeprefix(SAYS)) / num_steps
                self._lines.append(line)
        said = " | ".join(self._lines[-NUM_LINES_KEPT:]) or "nothing"
        raise TransientError(
            f"a rank of the probe did not answer; exit codes {self._ranks.exit_codes}, last lines: "
            f"{said}"
        )

    def leave(self) -> None:
        """Let the ranks end in good order."""
        self._ask(0)
        while self._ranks.has_output and self._ranks.read_lines(ANSWER_WITHIN_S):
            pass

    def _ask(self, num_steps: int) -> None:
        file = self._folder / TURN_FILE.format(self._num_turns)
        aside = file.with_suffix(".aside")
        aside.write_text(str(num_steps))
        aside.rename(file)  # a rank must never read half a number
        self._num_turns += 1


def measure(
    job: ProbeJob,
    layouts: Sequence[Layout],
    worth_above_s: float,
    limit_s: float,
    folder: Path,
    nursery: Nursery | None,
) -> dict[Layout, float | None] | float:
    """Rows per second of each candidate, the median of its turns; None where it failed.

    Args:
        job: what is run.
        layouts: the candidates; the first is tried alone before the others are started.
        worth_above_s: seconds of training above which the others are tried.
        limit_s: seconds that turns may take in all.
        folder: scratch.
        nursery: where to fork ranks.

    Returns:
        Or, where the first candidate shows that it is not worth it, the seconds of training.

    Raises:
        TransientError: the first candidate failed; so would the training.
    """
    with ExitStack() as stack:
        first = stack.enter_context(_contender(job, layouts[0], folder, nursery))
        first.calibrate()
        if (training_s := job.num_steps * first.step_s) < worth_above_s:
            return training_s
        contenders = {layouts[0]: first}
        for each in layouts[1:]:
            try:
                contenders[each] = stack.enter_context(_contender(job, each, folder, nursery))
                contenders[each].calibrate()
            except TransientError as exc:
                LOGGER.warning("%s cannot be measured and is left out: %s", each, exc)
                contenders.pop(each, None)
        _take_turns(list(contenders.values()), limit_s)
    return {each: _rows_per_s(job, contenders.get(each)) for each in layouts}


def _take_turns(contenders: Sequence[Contender], limit_s: float) -> None:
    """Whole rounds of turns, at least one, as long as the next one ends within the limit."""
    started = time.monotonic()
    round_s = sum(contender.turn_s for contender in contenders)
    for done in range(MAX_ROUNDS):
        if done and time.monotonic() - started + round_s > limit_s:
            return
        for contender in contenders:
            contender.take_turn()


def _rows_per_s(job: ProbeJob, contender: Contender | None) -> float | None:
    if contender is None:
        return None
    return job.rows_per_step / statistics.median(contender.step_times)


@contextmanager
def _contender(
    job: ProbeJob, layout: Layout, folder: Path, nursery: Nursery | None
) -> Iterator[Contender]:
    """The ranks of a candidate, gone when the context is left."""
    own = folder / f"{layout.num_ranks}x{layout.threads}"
    own.mkdir()
    (own / JOB_FILE).write_text(job.model_dump_json())
    lock = os.open(own, os.O_RDONLY)  # nobody else knows the folder, so nothing is to be locked
    spec = RankSpec(
        module=PROBE_MODULE,
        run_path=own,
        num_ranks=layout.num_ranks,
        threads=layout.threads,
        stall_warning_s=STALL_WARNING_S,
        stall_shutdown_s=STALL_SHUTDOWN_S,
        lock_descriptor=lock,
        store_file=own / "meeting",
    )
    try:
        with RankGroup(spec, nursery) as ranks:
            yield Contender(own, ranks)
    finally:
        os.close(lock)
