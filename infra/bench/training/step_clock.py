"""What a rank's step clock costs: its share of a step of ten milliseconds.

Steps with a clock and without alternate in short rounds; the fastest round of each kind counts, so
that other programs on the machine do not.
"""

from functools import partial

from infra.bench.figures import Measured, at_most, interleaved, seconds
from infra.bench.parts import Bench
from tasks.training.telemetry.step_clock import StepClock

STEPS_PER_ROUND = 500


def figures(bench: Bench) -> Measured:
    """The cost of three phases, two counts and a step, as a share of a short training step."""
    num_rounds = bench.size(40, 2)
    with StepClock(bench.folder, 0) as clock:
        ways = {"with": partial(_steps, clock), "without": partial(_steps, None)}
        timed = {name: partial(seconds, way) for name, way in ways.items()}
        taken = interleaved(timed, num_rounds)
    cost_s = (min(taken["with"]) - min(taken["without"])) / STEPS_PER_ROUND
    evidence = f"{1e6 * cost_s:.1f} us a step, fastest of {num_rounds} rounds"
    return [at_most("step clock, share of a 10 ms step", cost_s / 0.010, 0.01, evidence)]


def _steps(clock: StepClock | None) -> None:
    for _ in range(STEPS_PER_ROUND):
        if clock is not None:
            _measured_step(clock)


def _measured_step(clock: StepClock) -> None:
    """What the training loop asks of the clock in each step, around no work."""
    with clock.phase("data"):
        pass
    with clock.phase("compute"), clock.phase("exchange"):
        pass
    clock.add_rows(1024)
    clock.add_bytes(1 << 20)
    clock.step()
