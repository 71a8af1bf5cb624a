"""Telemetry of a run, gathered in the driver's process by a thread of its own.

Ranks are only looked at from outside and through the files that their clocks write: whatever goes
wrong here never ends a training, and what could not be measured is said to be unknown.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry
from pydantic import NonNegativeFloat, PositiveInt, ValidationError

from tasks.contracts.base import Contract
from tasks.contracts.telemetry import TrainingTelemetry
from tasks.kernel.errors import StorageError
from tasks.kernel.files import write_atomically
from tasks.training.telemetry.config import TelemetryConfig
from tasks.training.telemetry.devices import DeviceHistory, DeviceReader, open_nvml
from tasks.training.telemetry.energy import RaplMeter, energy_use, open_rapl, run_cost
from tasks.training.telemetry.exporting import (
    RankState,
    RunCollector,
    RunLabels,
    RunState,
    served_metrics,
    write_metrics,
)
from tasks.training.telemetry.host import HostHistory, look_at_host
from tasks.training.telemetry.processes import RankProcesses, tree_use
from tasks.training.telemetry.profiler import profile_files
from tasks.training.telemetry.rank_report import rank_telemetry
from tasks.training.telemetry.step_clock import ClockReading, read_clock

LOGGER = logging.getLogger(__name__)
PUBLISH_EVERY_S = 5.0
SPENT = "spent.json"
CLOCKS = "telemetry-*.json"


class Spent(Contract):
    """What the attempts of a run have taken so far; kept in the run directory over attempts."""

    num_attempts: PositiveInt = 1
    seconds: NonNegativeFloat = 0.0
    joules: NonNegativeFloat | None = None


@dataclass
class Meters:
    """What can be read on this host beside processes, and why not where it cannot."""

    rapl: RaplMeter | None = None
    devices: DeviceReader | None = None
    told: str = ""
    """Why the processor's energy is not measured."""
    devices_told: str = ""


def find_meters(devices: str | None) -> Meters:
    """The meters of this host; of its accelerators only where the ranks use them."""
    rapl, told = open_rapl()
    meters = Meters(rapl=rapl, told=told)
    if devices is not None:
        meters.devices, meters.devices_told = open_nvml(devices)
    return meters


@dataclass
class _Seen:
    """What the thread has gathered; guarded by the sampler's lock."""

    host: HostHistory
    num_samples: int = 0
    processes: dict[int, RankProcesses] = field(default_factory=dict)
    clocks: dict[int, ClockReading] = field(default_factory=dict)
    devices: dict[int, DeviceHistory] = field(default_factory=dict)
    processor_j: float | None = None


class TelemetrySampler:
    """Samples a run while the context lasts; enter it before the ranks start.

    Args:
        folder: the run directory.
        config: what is measured, and prices.
        labels: names of the run and the model, for Prometheus.
        devices: accelerators that the ranks use, as `CUDA_VISIBLE_DEVICES` names them, or `all`;
            None where they use none.
        meters: what to read; looked for on this host where left out.
    """

    def __init__(
        self,
        folder: Path,
        config: TelemetryConfig,
        labels: RunLabels,
        *,
        devices: str | None = None,
        meters: Meters | None = None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._meters = meters or find_meters(devices)
        self._host_name = socket.gethostname()
        self._registry = CollectorRegistry()
        self._registry.register(RunCollector(labels, self.state))
        self._lock = threading.Lock()
        self._seen = _Seen(HostHistory(look_at_host()))
        self._earlier: Spent | None = None
        self._started_s = self._ended_s = 0.0
        self._published_s = 0.0
        self._exports = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_now_and_then, name="telemetry")
        self._stack = ExitStack()
        self.port: int | None = None
        """Where the metrics are served, while they are."""

    def __enter__(self) -> Self:
        """Raises: ConfigurationError: the port for the metrics is in use."""
        for leftover in (*self._folder.glob(CLOCKS), *profile_files(self._folder)):
            leftover.unlink(missing_ok=True)
        self._earlier = read_spent(self._folder)
        self._started_s = time.monotonic()
        with ExitStack() as undo_on_failure:
            if self._meters.devices is not None:
                undo_on_failure.callback(self._meters.devices.close)
            if self._config.prometheus_port is not None:
                self.port = undo_on_failure.enter_context(
                    served_metrics(self._config.prometheus_port, self._registry)
                )
            self._thread.start()
            self._stack = undo_on_failure.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()
        self._publish()
        self._ended_s = time.monotonic()
        self._stack.close()

    def sample(self) -> None:
        """Look at everything once; the thread does it every `sample_every_s` seconds."""
        now_s = time.monotonic()
        host = look_at_host()
        clocks = self._read_clocks()
        uses = {
            rank: tree_use(clock.pid)
            for rank, clock in clocks.items()
            if clock.host == self._host_name
        }
        devices = self._meters.devices.read() if self._meters.devices else ()
        processor_j = self._processor_joules()
        with self._lock:
            seen = self._seen
            seen.num_samples += 1
            seen.host.add(host)
            seen.clocks |= clocks
            seen.processor_j = processor_j
            for rank, use in uses.items():
                seen.processes.setdefault(rank, RankProcesses()).add(now_s, use)
            for device in devices:
                history = seen.devices.setdefault(device.index, DeviceHistory(device.name))
                history.add(now_s, device)

    def clocks(self) -> tuple[ClockReading, ...]:
        """The latest reading of each rank's clock, in rank order."""
        with self._lock:
            return tuple(clock for _, clock in sorted(self._seen.clocks.items()))

    def state(self) -> RunState:
        """The run at this moment, as it was last sampled."""
        with self._lock:
            seen = self._seen
            return RunState(
                elapsed_s=self._elapsed_s(),
                num_attempts=self._num_attempts(),
                ranks=tuple(self._rank_state(rank) for rank in sorted(seen.clocks)),
                devices=tuple(d.latest for d in seen.devices.values() if d.latest is not None),
                energy_j=self._known_joules(),
                cpu_share=seen.host.cpu_share.latest,
                temperature_c=seen.host.temperature_c.latest,
            )

    def result(self, applied: Sequence[str] = ()) -> TrainingTelemetry:
        """All that was gathered, to be asked for when the ranks have ended.

        Args:
            applied: settings that were taken over from an earlier diagnosis, in sentences.
        """
        with self._lock:
            seen = self._seen
            ranks = tuple(
                rank_telemetry(clock, self._processes(rank))
                for rank, clock in sorted(seen.clocks.items())
            )
            devices = tuple(d.summary(index) for index, d in sorted(seen.devices.items()))
            spent = self._spent()
            energy = energy_use(
                self._config, seen.processor_j, self._energy_told(), devices, self._cpu_s()
            )
            host = seen.host.summary()
        energy = energy.model_copy(update={"joules": spent.joules})
        if energy.joules is None and spent.num_attempts > 1 and self._known_joules() is not None:
            told = f"{energy.known_by}; not known for every attempt"
            energy = energy.model_copy(update={"known_by": told, "estimated": False})
        num_hosts = len({rank.host for rank in ranks}) or 1
        return TrainingTelemetry(
            seconds=spent.seconds,
            num_attempts=spent.num_attempts,
            num_samples=seen.num_samples,
            ranks=ranks,
            host=host,
            devices=devices,
            energy=energy,
            cost=run_cost(self._config, energy, spent.seconds, num_hosts),
            applied=tuple(applied),
        )

    def _sample_now_and_then(self) -> None:
        while not self._stop.wait(self._config.sample_every_s):
            self.sample()
            if time.monotonic() - self._published_s >= PUBLISH_EVERY_S:
                self._publish()

    def _processor_joules(self) -> float | None:
        try:
            return self._meters.rapl.joules() if self._meters.rapl else None
        except (OSError, ValueError) as exc:
            self._meters.rapl = None
            self._meters.told = f"the RAPL counters could not be read to the end ({exc})"
            return None

    def _read_clocks(self) -> dict[int, ClockReading]:
        found = {}
        for path in self._folder.glob(CLOCKS):
            number = path.stem.removeprefix("telemetry-")
            try:
                clock = read_clock(self._folder, int(number)) if number.isdigit() else None
            except (OSError, ValidationError) as exc:  # of a shared folder; the next look may do
                LOGGER.debug("%s cannot be read: %s", path, exc)
                continue
            if clock is not None:
                found[clock.rank] = clock
        return found

    def _publish(self) -> None:
        """Note what was spent, and export; a disk that refuses it is told of once."""
        self._published_s = time.monotonic()
        with self._lock:
            spent = self._spent()
        try:
            write_atomically(self._folder / SPENT, spent.model_dump_json())
            if self._config.prometheus_textfile is not None:
                write_metrics(self._config.prometheus_textfile, self._registry)
        except StorageError as exc:
            if self._exports:
                LOGGER.warning("telemetry is not written, the training goes on: %s", exc)
            self._exports = False

    # What follows is called with the lock held.

    def _elapsed_s(self) -> float:
        return (self._ended_s or time.monotonic()) - self._started_s

    def _num_attempts(self) -> int:
        return 1 + (self._earlier.num_attempts if self._earlier else 0)

    def _cpu_s(self) -> float:
        """CPU seconds of all ranks; a clock also knows of ranks that were never sampled."""
        ranks = self._seen.clocks
        return sum(max(clock.cpu_s, self._processes(rank).cpu_s) for rank, clock in ranks.items())

    def _processes(self, rank: int) -> RankProcesses:
        return self._seen.processes.get(rank) or RankProcesses()

    def _energy_told(self) -> str:
        rapl = self._meters.rapl
        told = rapl.told if rapl else self._meters.told
        return f"{told}; {self._meters.devices_told}" if self._meters.devices_told else told

    def _known_joules(self) -> float | None:
        seen = self._seen
        devices = [d.summary(index) for index, d in seen.devices.items()]
        return energy_use(self._config, seen.processor_j, "", devices, self._cpu_s()).joules

    def _spent(self) -> Spent:
        """Of all attempts; energy is unknown where it is for one of them."""
        seconds, joules = self._elapsed_s(), self._known_joules()
        if self._earlier is None:
            return Spent(seconds=seconds, joules=joules)
        both = None
        if joules is not None and self._earlier.joules is not None:
            both = joules + self._earlier.joules
        return Spent(
            num_attempts=self._num_attempts(),
            seconds=seconds + self._earlier.seconds,
            joules=both,
        )

    def _rank_state(self, rank: int) -> RankState:
        clock, processes = self._seen.clocks[rank], self._seen.processes.get(rank)
        if processes is None:
            return RankState(clock)
        return RankState(
            clock,
            busy_cores=processes.busy_cores.latest,
            resident_bytes=processes.resident_bytes.latest,
            disk_read_bytes=processes.disk_read_bytes,
            disk_written_bytes=processes.disk_written_bytes,
        )


def read_spent(folder: Path) -> Spent | None:
    """What earlier attempts took; None where there was none."""
    try:
        return Spent.model_validate_json((folder / SPENT).read_text())
    except FileNotFoundError:
        return None
    except ValidationError:
        LOGGER.warning("%s is damaged: what earlier attempts took is not known", folder / SPENT)
        return None
