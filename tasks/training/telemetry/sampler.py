"""Telemetry of a run, gathered in the driver's process by a thread of its own.

Ranks are only looked at from outside and through the files that their clocks write: whatever goes
wrong here never ends a training, and what could not be measured is said to be unknown.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import NonNegativeFloat, PositiveInt, ValidationError

from tasks.contracts.base import Contract
from tasks.contracts.telemetry import DeviceTelemetry, EnergyUse, RankTelemetry, TrainingTelemetry
from tasks.kernel.errors import StorageError, refused_writes_explained
from tasks.kernel.files import write_atomically
from tasks.training.telemetry.config import TelemetryConfig
from tasks.training.telemetry.diagnosis import JobFacts, diagnose
from tasks.training.telemetry.energy import (
    DeviceHistory,
    NvmlReader,
    RaplMeter,
    energy_use,
    open_nvml,
    open_rapl,
    run_cost,
)
from tasks.training.telemetry.host import HostHistory, RankProcesses, look_at_host, tree_use
from tasks.training.telemetry.profiler import profile_files, read_profiles
from tasks.training.telemetry.step_clock import STEP_PHASES, ClockReading, read_clock

LOGGER = logging.getLogger(__name__)
SAMPLE_EVERY_S = 1.0
"""Short enough for a rank's peak memory; a sample takes some milliseconds of one core."""
PUBLISH_EVERY_S = 5.0
SPENT = "spent.json"
CLOCKS = "telemetry-*.json"
PREFIX = "falaj_training_"
LABELS = ("run", "model")

# Metric to its type, its help and what it is labelled with beside the run and the model.
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
METRICS: dict[str, tuple[Family, str, tuple[str, ...]]] = {
    "elapsed_seconds": (GaugeMetricFamily, "Wall time of this attempt.", ()),
    "attempts": (GaugeMetricFamily, "Attempts so far, this one included.", ()),
    "energy_joules": (CounterMetricFamily, "Energy used by this attempt.", ()),
    "host_cpu_ratio": (GaugeMetricFamily, "Busy share of all cores.", ()),
    "host_temperature_celsius": (GaugeMetricFamily, "Hottest processor sensor.", ()),
    "rows": (CounterMetricFamily, "Rows that the rank trained on.", ("rank",)),
    "steps": (CounterMetricFamily, "Training steps.", ("rank",)),
    "wire_bytes": (CounterMetricFamily, "Bytes given to the network.", ("rank",)),
    "cpu_seconds": (CounterMetricFamily, "CPU time of the rank.", ("rank",)),
    "disk_read_bytes": (CounterMetricFamily, "Bytes read from disk.", ("rank",)),
    "disk_written_bytes": (CounterMetricFamily, "Bytes written to disk.", ("rank",)),
    "rows_per_second": (GaugeMetricFamily, "Rows a second in training steps.", ("rank",)),
    "step_median_seconds": (GaugeMetricFamily, "Median training step.", ("rank",)),
    "busy_cores": (GaugeMetricFamily, "Cores in use.", ("rank",)),
    "resident_bytes": (GaugeMetricFamily, "Resident memory.", ("rank",)),
    "peak_resident_bytes": (GaugeMetricFamily, "Peak memory.", ("rank",)),
    "phase_seconds": (CounterMetricFamily, "Wall time by phase of its work.", ("rank", "phase")),
    "device_utilisation_ratio": (GaugeMetricFamily, "Time with a kernel running.", ("device",)),
    "device_memory_bytes": (GaugeMetricFamily, "Memory in use.", ("device",)),
    "device_temperature_celsius": (GaugeMetricFamily, "Temperature.", ("device",)),
    "device_power_watts": (GaugeMetricFamily, "Power drawn.", ("device",)),
}


class Spent(Contract):
    """What the attempts of a run have taken so far; kept in the run directory over attempts."""

    num_attempts: PositiveInt = 1
    seconds: NonNegativeFloat = 0.0
    joules: NonNegativeFloat | None = None


@dataclass
class Meters:
    """What can be read on this host beside processes, and why not where it cannot."""

    rapl: RaplMeter | None = None
    devices: NvmlReader | None = None
    told: str = ""
    """Why the processor's energy is not measured."""
    devices_told: str = ""

    @classmethod
    def found(cls, devices: str | None) -> Meters:
        """The meters of this host; of its accelerators only where the ranks use them."""
        rapl, told = open_rapl()
        reader, devices_told = (None, "") if devices is None else open_nvml(devices)
        return cls(rapl, reader, told, devices_told)

    def processor_joules(self) -> float | None:
        """What the processor used; a meter that fails is not asked again."""
        try:
            return self.rapl.joules() if self.rapl else None
        except (OSError, ValueError) as exc:
            self.rapl = None
            self.told = f"the RAPL counters could not be read to the end ({exc})"
            return None

    def energy_told(self) -> str:
        """What is measured of the energy, and what cannot be."""
        told = self.rapl.told if self.rapl else self.told
        return f"{told}; {self.devices_told}" if self.devices_told else told


class TelemetrySampler(Collector):
    """Samples a run while the context lasts; enter it before the ranks start.

    Args:
        folder: the run directory.
        config: what is measured, and prices.
        model: name of the model; with that of the folder it labels all metrics.
        devices: accelerators that the ranks use, as `CUDA_VISIBLE_DEVICES` names them, or `all`;
            None where they use none.
        meters: what to read; looked for on this host where left out.
        every_s: seconds between two samples.
    """

    def __init__(
        self,
        folder: Path,
        config: TelemetryConfig,
        model: str,
        *,
        devices: str | None = None,
        meters: Meters | None = None,
        every_s: float = SAMPLE_EVERY_S,
    ) -> None:
        self._folder = folder
        self._config = config
        self._labels = (folder.name, model)
        self._meters = meters or Meters.found(devices)
        self._every_s = every_s
        self._host = HostHistory()
        self._num_samples = 0
        self._processes: dict[int, RankProcesses] = {}
        self._clocks: dict[int, ClockReading] = {}
        self._devices: dict[int, DeviceHistory] = {}
        self._processor_j: float | None = None
        self._earlier: Spent | None = None
        self._started_s = self._published_s = 0.0
        self._elapsed_s = 0.0
        self._exports = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_now_and_then, name="telemetry")

    def __enter__(self) -> Self:
        for leftover in (*self._folder.glob(CLOCKS), *profile_files(self._folder)):
            leftover.unlink(missing_ok=True)
        self._earlier = read_spent(self._folder)
        self._started_s = time.monotonic()
        self._thread.start()
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
        if self._meters.devices is not None:
            self._meters.devices.close()

    def sample(self) -> None:
        """Look at everything once. While the context lasts, its thread alone may call it."""
        now_s = time.monotonic()
        self._elapsed_s = now_s - self._started_s
        self._num_samples += 1
        self._host.add(look_at_host())
        self._processor_j = self._meters.processor_joules()
        for clock in self._read_clocks():
            self._clocks[clock.rank] = clock
            if clock.host == socket.gethostname():
                use = tree_use(clock.pid)
                self._processes.setdefault(clock.rank, RankProcesses()).add(now_s, use)
        for device in self._meters.devices.read() if self._meters.devices else ():
            self._devices.setdefault(device.index, DeviceHistory(device.name)).add(device)

    def result(self) -> TrainingTelemetry:
        """All that was gathered, to be asked for when the context is left."""
        ranks, devices, energy = self._ranks(), self._device_summaries(), self._energy()
        spent = self._spent(energy.joules)
        if spent.joules is None and energy.joules is not None:
            told = f"{energy.known_by}; not known for every attempt"
            energy = energy.model_copy(update={"known_by": told, "estimated": False})
        energy = energy.model_copy(update={"joules": spent.joules})
        num_hosts = len({rank.host for rank in ranks}) or 1
        return TrainingTelemetry(
            seconds=spent.seconds,
            num_attempts=spent.num_attempts,
            num_samples=self._num_samples,
            ranks=ranks,
            host=self._host.summary(),
            devices=devices,
            energy=energy,
            cost=run_cost(self._config, energy, spent.seconds, num_hosts),
        )

    def diagnosed(self, job: JobFacts) -> TrainingTelemetry:
        """The result with what held the run back; for ranks that have ended well."""
        told = self.result()
        job = replace(job, num_hosts=len({rank.host for rank in told.ranks}) or 1)
        diagnosis = diagnose(told.ranks, told.host, job, read_profiles(self._folder))
        return told.model_copy(update={"diagnosis": diagnosis})

    def collect(self) -> Iterable[Metric]:
        """All metrics as they were last sampled; what cannot be measured here has no sample."""
        families = {
            name: family(PREFIX + name, text, labels=(*LABELS, *labels))
            for name, (family, text, labels) in METRICS.items()
        }
        for name, value, *labels in self._values():
            if value is not None:
                families[name].add_metric([*self._labels, *map(str, labels)], value)
        return families.values()

    def _values(self) -> Iterator[tuple[str, float | None, *tuple[object, ...]]]:
        yield "elapsed_seconds", self._elapsed_s
        yield "attempts", self._spent(None).num_attempts
        yield "energy_joules", self._energy().joules
        yield "host_cpu_ratio", self._host.cpu_share.latest
        yield "host_temperature_celsius", self._host.temperature_c.latest
        for rank in self._ranks():
            processes = self._processes.get(rank.rank) or RankProcesses()
            yield "rows", rank.num_rows, rank.rank
            yield "steps", rank.num_steps, rank.rank
            yield "wire_bytes", rank.wire_bytes, rank.rank
            yield "cpu_seconds", self._clocks[rank.rank].cpu_s, rank.rank
            yield "disk_read_bytes", rank.disk_read_bytes, rank.rank
            yield "disk_written_bytes", rank.disk_written_bytes, rank.rank
            yield "rows_per_second", rank.rows_per_s, rank.rank
            yield "step_median_seconds", rank.step_p50_s, rank.rank
            yield "busy_cores", processes.busy_cores.latest, rank.rank
            yield "resident_bytes", processes.resident_bytes.latest, rank.rank
            yield "peak_resident_bytes", self._clocks[rank.rank].peak_memory_bytes, rank.rank
            for phase, spent in rank.phases.items():
                yield "phase_seconds", spent.seconds, rank.rank, phase
        for index, device in self._devices.items():
            yield "device_utilisation_ratio", device.utilisation.latest, index
            yield "device_memory_bytes", device.memory_bytes.latest, index
            yield "device_temperature_celsius", device.temperature_c.latest, index
            yield "device_power_watts", device.power_w.latest, index

    def _sample_now_and_then(self) -> None:
        while not self._stop.wait(self._every_s):
            self.sample()
            if time.monotonic() - self._published_s >= PUBLISH_EVERY_S:
                self._publish()

    def _read_clocks(self) -> Iterator[ClockReading]:
        for path in self._folder.glob(CLOCKS):
            number = path.stem.removeprefix("telemetry-")
            try:
                clock = read_clock(self._folder, int(number)) if number.isdigit() else None
            except (OSError, ValidationError) as exc:  # of a shared folder; the next look may do
                LOGGER.debug("%s cannot be read: %s", path, exc)
                continue
            if clock is not None:
                yield clock

    def _publish(self) -> None:
        """Note what was spent, and export; a disk that refuses it is told of once."""
        self._published_s = time.monotonic()
        spent, path = self._spent(self._energy().joules), self._config.prometheus_textfile
        try:
            write_atomically(self._folder / SPENT, spent.model_dump_json())
            if path is not None:
                write_metrics(path, self)
        except StorageError as exc:
            if self._exports:
                LOGGER.warning("telemetry is not written, the training goes on: %s", exc)
            self._exports = False

    def _ranks(self) -> tuple[RankTelemetry, ...]:
        return tuple(
            rank_telemetry(clock, self._processes.get(rank) or RankProcesses())
            for rank, clock in sorted(self._clocks.items())
        )

    def _device_summaries(self) -> tuple[DeviceTelemetry, ...]:
        return tuple(device.summary(index) for index, device in sorted(self._devices.items()))

    def _energy(self) -> EnergyUse:
        """Of this attempt."""
        return energy_use(
            self._config,
            self._processor_j,
            self._meters.energy_told(),
            self._device_summaries(),
            sum(rank.cpu_s for rank in self._ranks()),
        )

    def _spent(self, joules: float | None) -> Spent:
        """Of all attempts; energy is unknown where it is for one of them."""
        earlier = self._earlier
        if earlier is None:
            return Spent(seconds=self._elapsed_s, joules=joules)
        known = joules is not None and earlier.joules is not None
        return Spent(
            num_attempts=earlier.num_attempts + 1,
            seconds=earlier.seconds + self._elapsed_s,
            joules=(earlier.joules or 0.0) + (joules or 0.0) if known else None,
        )


def rank_telemetry(clock: ClockReading, processes: RankProcesses) -> RankTelemetry:
    """Put together what is known of a rank.

    Args:
        clock: its last reading.
        processes: samples of its processes; none where it ran on another host.
    """
    steady_s = sum(clock.phases[name].steady_s for name in STEP_PHASES)
    sampled_bytes = int(processes.resident_bytes.highest or 0)
    read_bytes, written_bytes = processes.disk_bytes
    return RankTelemetry(
        rank=clock.rank,
        host=clock.host,
        num_steps=clock.num_steps,
        num_rows=clock.num_rows,
        rows_per_s=clock.steady_rows / steady_s if clock.steady_steps and steady_s else None,
        phases={str(name): phase for name, phase in clock.phases.items()},
        step_p50_s=clock.step_p50_s,
        step_p95_s=clock.step_p95_s,
        wire_bytes=clock.wire_bytes,
        cpu_s=max(clock.cpu_s, processes.cpu_s),
        peak_memory_bytes=max(clock.peak_memory_bytes, sampled_bytes),
        major_faults=clock.major_faults,
        preemptions=clock.preemptions,
        busy_cores_mean=processes.busy_cores.mean,
        busy_cores_max=processes.busy_cores.highest,
        disk_read_bytes=read_bytes,
        disk_written_bytes=written_bytes,
    )


def write_metrics(path: Path, collector: Collector) -> None:
    """Replace the text file by the metrics of this moment: whole or as it was.

    Raises:
        StorageError: the disk refused a write.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    with refused_writes_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(path), registry)


def read_spent(folder: Path) -> Spent | None:
    """What earlier attempts took; None where there was none."""
    try:
        return Spent.model_validate_json((folder / SPENT).read_text())
    except FileNotFoundError:
        return None
    except ValidationError:
        LOGGER.warning("%s is damaged: what earlier attempts took is not known", folder / SPENT)
        return None
