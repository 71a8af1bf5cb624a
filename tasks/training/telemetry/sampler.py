"""Telemetry of a run, gathered in the driver's process by a thread of its own.

Ranks are only looked at from outside and through the files that their clocks write: whatever goes
wrong here never ends a training, and what could not be measured is said to be unknown.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import NonNegativeFloat, NonNegativeInt, ValidationError

from tasks.contracts.base import Contract, retired
from tasks.contracts.hardware import PriceList
from tasks.contracts.telemetry import EnergyUse, RankTelemetry, TrainingTelemetry
from tasks.kernel.errors import StorageError
from tasks.kernel.files import write_atomically
from tasks.training.telemetry import meters
from tasks.training.telemetry.diagnosis import JobFacts, diagnose
from tasks.training.telemetry.step_clock import CLOCKS, ClockReading, profile_files, read_clocks

LOGGER = logging.getLogger(__name__)
SAMPLE_EVERY_S = 1.0
"""Short enough for a rank's peak memory; a sample takes some milliseconds of one core."""
SPENT = "spent.json"


class Spent(Contract):
    """What the attempts of a run have taken so far; kept in the run directory over attempts."""

    num_attempts: NonNegativeInt = 0
    seconds: NonNegativeFloat = 0.0
    joules: NonNegativeFloat = 0.0

    _retired = retired("cpu_s")


@dataclass(eq=False)
class TelemetrySampler:
    """Samples a run while the context lasts; enter it before the ranks start.

    Args:
        folder: the run directory.
        prices: of the hardware class that the ranks run on.
        processor: meter of the processor's energy; that of this host where left out.
        devices: meter of the accelerators that the ranks use; None where they use none.
        every_s: seconds between two samples.
    """

    folder: Path
    prices: PriceList
    processor: meters.ProcessorMeter = field(default_factory=meters.ProcessorMeter)
    devices: meters.DeviceMeter | None = None
    every_s: float = SAMPLE_EVERY_S

    def __post_init__(self) -> None:
        self._host = meters.HostMeter()
        self._num_samples = 0
        self._ranks: dict[int, ClockReading] = {}
        self._processor_j: float | None = None
        self._earlier = Spent()
        self._started_s = self._elapsed_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_now_and_then, name="telemetry")

    def __enter__(self) -> Self:
        for leftover in (*self.folder.glob(CLOCKS), *profile_files(self.folder)):
            leftover.unlink(missing_ok=True)
        self._earlier = read_spent(self.folder)
        self._started_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()
        if self.devices is not None:
            self.devices.close()

    def sample(self) -> None:
        """Look at everything once. While the context lasts, its thread alone may call it."""
        self._elapsed_s = time.monotonic() - self._started_s
        self._num_samples += 1
        self._host.sample()
        self._processor_j = self.processor.joules()
        for clock in read_clocks(self.folder):
            self._take(clock)
        if self.devices is not None:
            self.devices.sample()
        try:  # for the next attempt, should this one be cut off
            write_atomically(self.folder / SPENT, self._spent().model_dump_json(), durable=False)
        except StorageError as exc:
            LOGGER.warning("telemetry is not written, the training goes on: %s", exc)

    def _take(self, clock: ClockReading) -> None:
        """Keep the newest reading of a rank, and the most cores that were busy between two."""
        before = self._ranks.get(clock.rank)
        most = before.busy_cores_max if before else None
        if before and before.pid == clock.pid and clock.elapsed_s > before.elapsed_s:
            busy = (clock.cpu_s - before.cpu_s) / (clock.elapsed_s - before.elapsed_s)
            most = max(most or 0.0, busy)
        self._ranks[clock.rank] = clock.model_copy(update={"busy_cores_max": most})

    def result(self) -> TrainingTelemetry:
        """All that was gathered, to be asked for when the context is left."""
        ranks = tuple(
            RankTelemetry(**clock.model_dump(include=set(RankTelemetry.model_fields)))
            for _, clock in sorted(self._ranks.items())
        )
        spent = self._spent()
        return TrainingTelemetry(
            seconds=spent.seconds,
            num_attempts=spent.num_attempts,
            num_samples=self._num_samples,
            ranks=ranks,
            host=self._host.summary(),
            devices=self.devices.summaries() if self.devices else (),
            energy=self._energy().model_copy(update={"joules": spent.joules}),
        )

    def diagnosed(self, job: JobFacts) -> TrainingTelemetry:
        """The result with what held the run back; for ranks that have ended well."""
        result = self.result()
        return result.model_copy(update={"diagnosis": diagnose(result.ranks, result.host, job)})

    def _sample_now_and_then(self) -> None:
        while not self._stop.wait(self.every_s):
            self.sample()

    def _energy(self) -> EnergyUse:
        """Of this attempt."""
        known_by = self.processor.known_by
        if self.devices is not None and self.devices.trouble:
            known_by += f"; {self.devices.trouble}"
        return meters.energy_use(
            self.prices,
            self._processor_j,
            known_by,
            self.devices.summaries() if self.devices else (),
            sum(clock.cpu_s for clock in self._ranks.values()),
        )

    def _spent(self) -> Spent:
        """Of all attempts."""
        earlier = self._earlier
        return Spent(
            num_attempts=earlier.num_attempts + 1,
            seconds=earlier.seconds + self._elapsed_s,
            joules=earlier.joules + (self._energy().joules or 0.0),
        )


def read_spent(folder: Path) -> Spent:
    """What earlier attempts took."""
    try:
        return Spent.model_validate_json((folder / SPENT).read_text())
    except FileNotFoundError:
        return Spent()
    except ValidationError:
        LOGGER.warning("%s is damaged: what earlier attempts took is not known", folder / SPENT)
        return Spent()
