"""The state of a running training in Prometheus' words: as a text file, or served on loopback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tasks.kernel.errors import ConfigurationError, refused_writes_explained
from tasks.training.telemetry.devices import DeviceSample
from tasks.training.telemetry.rank_report import rows_per_s
from tasks.training.telemetry.step_clock import ClockReading

LOGGER = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
PREFIX = "falaj_training_"
OWN_LABELS = ("run", "model")


@dataclass(frozen=True)
class RankState:
    """One rank at this moment; None for what was not sampled."""

    clock: ClockReading
    busy_cores: float | None = None
    resident_bytes: float | None = None
    disk_read_bytes: int | None = None
    disk_written_bytes: int | None = None


@dataclass(frozen=True)
class RunState:
    """A run at this moment."""

    elapsed_s: float
    num_attempts: int
    ranks: tuple[RankState, ...] = ()
    devices: tuple[DeviceSample, ...] = ()
    energy_j: float | None = None
    cpu_share: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True)
class RunLabels:
    """Labels of all metrics of one run: its name and that of the model."""

    run: str
    model: str


@dataclass(frozen=True)
class RunCollector(Collector):
    """Turns the state of a run into metrics when it is asked."""

    labels: RunLabels
    state: Callable[[], RunState]

    def collect(self) -> Iterator[Metric]:
        """All metrics; those that cannot be measured here have no sample."""
        state = self.state()
        yield self._gauge("elapsed_seconds", "Wall time of this attempt.", state.elapsed_s)
        yield self._gauge("attempts", "Attempts so far, this one included.", state.num_attempts)
        yield self._counter("energy_joules", "Energy used by this attempt.", state.energy_j)
        yield self._gauge("host_cpu_ratio", "Busy share of all cores.", state.cpu_share)
        yield self._gauge(
            "host_temperature_celsius", "Hottest processor sensor.", state.temperature_c
        )
        yield from self._of_ranks(state.ranks)
        yield from self._of_devices(state.devices)

    def _of_ranks(self, ranks: tuple[RankState, ...]) -> Iterator[Metric]:
        rising: list[tuple[str, str, Callable[[RankState], float | None]]] = [
            ("rows", "Rows that the rank trained on.", lambda r: r.clock.num_rows),
            ("steps", "Training steps.", lambda r: r.clock.num_steps),
            ("wire_bytes", "Bytes given to the network.", lambda r: r.clock.wire_bytes),
            ("cpu_seconds", "CPU time of the rank.", lambda r: r.clock.cpu_s),
            ("disk_read_bytes", "Bytes read from disk.", lambda r: r.disk_read_bytes),
            ("disk_written_bytes", "Bytes written to disk.", lambda r: r.disk_written_bytes),
        ]
        for name, text, value in rising:
            counter = CounterMetricFamily(PREFIX + name, text, labels=[*OWN_LABELS, "rank"])
            self._fill(counter, ranks, value)
            yield counter
        levels: list[tuple[str, str, Callable[[RankState], float | None]]] = [
            ("rows_per_second", "Rows a second in training steps.", lambda r: rows_per_s(r.clock)),
            ("step_median_seconds", "Median training step.", lambda r: r.clock.step_p50_s),
            ("busy_cores", "Cores in use.", lambda r: r.busy_cores),
            ("resident_bytes", "Resident memory.", lambda r: r.resident_bytes),
            ("peak_resident_bytes", "Peak memory.", lambda r: r.clock.peak_memory_bytes),
        ]
        for name, text, value in levels:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=[*OWN_LABELS, "rank"])
            self._fill(gauge, ranks, value)
            yield gauge
        phases = CounterMetricFamily(
            PREFIX + "phase_seconds",
            "Wall time by phase of the rank's work.",
            labels=[*OWN_LABELS, "rank", "phase"],
        )
        for rank in ranks:
            for phase, time in rank.clock.phases.items():
                phases.add_metric([*self._values(), str(rank.clock.rank), phase], time.seconds)
        yield phases

    def _fill(
        self,
        family: CounterMetricFamily | GaugeMetricFamily,
        ranks: tuple[RankState, ...],
        value: Callable[[RankState], float | None],
    ) -> None:
        for rank in ranks:
            if (known := value(rank)) is not None:
                family.add_metric([*self._values(), str(rank.clock.rank)], known)

    def _of_devices(self, devices: tuple[DeviceSample, ...]) -> Iterator[Metric]:
        levels: list[tuple[str, str, Callable[[DeviceSample], float | None]]] = [
            ("device_utilisation_ratio", "Time with a kernel running.", lambda d: d.utilisation),
            ("device_memory_bytes", "Memory in use.", lambda d: d.memory_bytes),
            ("device_temperature_celsius", "Temperature.", lambda d: d.temperature_c),
            ("device_power_watts", "Power drawn.", lambda d: d.power_w),
        ]
        for name, text, value in levels:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=[*OWN_LABELS, "device"])
            for device in devices:
                if (known := value(device)) is not None:
                    gauge.add_metric([*self._values(), str(device.index)], known)
            yield gauge

    def _values(self) -> list[str]:
        return [self.labels.run, self.labels.model]

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=OWN_LABELS)
        if value is not None:
            gauge.add_metric(self._values(), value)
        return gauge

    def _counter(self, name: str, text: str, value: float | None) -> Metric:
        counter = CounterMetricFamily(PREFIX + name, text, labels=OWN_LABELS)
        if value is not None:
            counter.add_metric(self._values(), value)
        return counter


def write_metrics(path: Path, registry: CollectorRegistry) -> None:
    """Replace the text file by the metrics of this moment: whole or as it was.

    Raises:
        StorageError: the disk refused a write.
    """
    with refused_writes_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(path), registry)


@contextmanager
def served_metrics(port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Serve the metrics under `/metrics` on loopback while the context lasts; yields the port.

    Raises:
        ConfigurationError: the port is in use.
    """
    try:
        server, thread = start_http_server(port, addr=LOOPBACK, registry=registry)
    except OSError as exc:
        raise ConfigurationError(
            f"prometheus_port={port} cannot be served on {LOOPBACK} ({exc.strerror}); choose "
            "another one, or 0 for any free port"
        ) from exc
    try:
        LOGGER.info("metrics of this training: http://%s:%d/metrics", LOOPBACK, server.server_port)
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
