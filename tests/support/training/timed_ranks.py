"""Ranks with known shares of their time, and counters of energy as a host shows them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from tasks.contracts.telemetry import HostTelemetry, PhaseTime, RankTelemetry
from tasks.training.config import TrainingConfig
from tasks.training.telemetry.diagnosis import JobFacts
from tasks.training.telemetry.step_clock import PHASES, WARM_UP_STEPS, ClockReading, clock_path

NUM_STEPS = 100
HOST = HostTelemetry(
    name="one", num_cores=2, memory_bytes=8_000_000_000, cpu_share_mean=0.9, cpu_share_max=1.0,
    temperature_max_c=None, network_sent_bytes=0, network_received_bytes=0,
    loopback_bytes=1_000_000, swapped_in_bytes=0,
)  # fmt: skip
JOB = JobFacts(
    TrainingConfig(global_batch_size=2048, num_shards=8), num_ranks=2, threads_per_rank=1,
    num_cores=2,
)  # fmt: skip
RANGE_UJ = 262_143_328_850


def rank(
    number: int = 0,
    data_ms: float = 0.3,
    compute_ms: float = 9.0,
    exchange_ms: float = 0.7,
    cpu_share: float = 1.0,
    **changes: object,
) -> RankTelemetry:
    """A rank whose steps after the first few take so long."""
    steady = {"data": data_ms, "compute": compute_ms, "exchange": exchange_ms}
    phases = {}
    for name in PHASES:
        seconds = steady.get(name, 0.0) * (NUM_STEPS - WARM_UP_STEPS) / 1000
        cpu_s = seconds * (cpu_share if name == "compute" else 0.1)
        phases[name] = PhaseTime(
            seconds=seconds + 1, cpu_s=cpu_s, steady_s=seconds, steady_cpu_s=cpu_s
        )
    values: dict[str, object] = {
        "rank": number, "host": "one", "num_steps": NUM_STEPS, "num_rows": 102_400,
        "rows_per_s": 50_000.0, "phases": phases, "step_p50_s": 0.01, "step_p95_s": 0.012,
        "wire_bytes": 100 * 4_000_000, "cpu_s": 1.0, "peak_memory_bytes": 500_000_000,
        "major_faults": 0, "busy_cores_mean": 0.9, "busy_cores_max": 1.0,
        "disk_read_bytes": 0, "disk_written_bytes": 0,
    }  # fmt: skip
    return RankTelemetry.model_validate({**values, **changes})


def reading(number: int, pid: int, **changes: object) -> ClockReading:
    """What a rank's clock shows."""
    measured = rank(number, num_rows=6400, cpu_s=8.0, busy_cores_max=None).model_dump()
    now = {"phase": "compute", "elapsed_s": 12.0, "doing": "training", "epoch": 0, "step": 1}
    return ClockReading.model_validate({**measured, "pid": pid, **now, **changes})


def write_clock(folder: Path, number: int, pid: int = 1, **changes: object) -> None:
    """What a rank's clock would have written."""
    clock_path(folder, number).write_text(reading(number, pid, **changes).model_dump_json())


def zone(root: Path, name: str, label: str, energy_uj: int) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{label}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    return folder


class NotSupportedError(Exception):
    pass


def not_supported(_: object) -> float:
    raise NotSupportedError


def library(
    energy: Callable[[object], float] = lambda _: 5_000_000, closed: list[bool] | None = None
) -> SimpleNamespace:
    """What a management library of two devices answers, in its units."""
    return SimpleNamespace(
        NVMLError=NotSupportedError,
        nvmlInit=lambda: None,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}abc",
        nvmlDeviceGetName=lambda _: "a device",
        nvmlDeviceGetPowerUsage=lambda _: 250_000,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=75, memory=10),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=8, free=5, used=3),
        nvmlDeviceGetTemperature=lambda _handle, _sensor: 61,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlShutdown=lambda: (closed if closed is not None else []).append(True),
    )
