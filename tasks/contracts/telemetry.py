"""Values about what a training took and where its time went."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from tasks.contracts.base import Contract, retired
from tasks.kernel.values import Described


class PhaseTime(Described):
    """What one rank spent in one phase."""

    seconds: NonNegativeFloat
    cpu_s: NonNegativeFloat
    """CPU seconds of the thread that runs the loop: fewer where it waited."""
    steady_s: NonNegativeFloat
    """Without the first steps, which build what later ones reuse."""
    steady_cpu_s: NonNegativeFloat

    _retired = retired("p50_s", "p95_s")


class RankTelemetry(Described):
    """What one rank of a training run did and took."""

    rank: NonNegativeInt
    host: str
    num_steps: NonNegativeInt
    num_rows: NonNegativeInt
    rows_per_s: NonNegativeFloat | None
    """While training: without validation, checkpoints and the first steps."""
    phases: dict[str, PhaseTime]
    """`data`, `compute`, `exchange`, `validate`, `checkpoint` and `other`."""
    step_p50_s: NonNegativeFloat | None = None
    step_p95_s: NonNegativeFloat | None = None
    wire_bytes: NonNegativeInt = Field(description="Given to the network for other ranks.")
    cpu_s: NonNegativeFloat
    peak_memory_bytes: NonNegativeInt = Field(description="Resident.")
    major_faults: NonNegativeInt = Field(description="Pages read back from disk or swap.")
    busy_cores_mean: NonNegativeFloat | None = Field(description="None where never sampled.")
    busy_cores_max: NonNegativeFloat | None
    disk_read_bytes: NonNegativeInt | None
    disk_written_bytes: NonNegativeInt | None

    _retired = retired("preemptions")


class HostTelemetry(Contract):
    """The driver's host while a training run lasted, everything else on it included."""

    name: str
    num_cores: PositiveInt
    memory_bytes: PositiveInt
    cpu_share_mean: float | None = Field(description="Of all cores; None where never sampled.")
    cpu_share_max: float | None
    temperature_max_c: float | None = Field(description="Hottest sensor; None without sensors.")
    network_sent_bytes: NonNegativeInt = Field(description="All interfaces but loopback.")
    network_received_bytes: NonNegativeInt
    loopback_bytes: NonNegativeInt
    swapped_in_bytes: NonNegativeInt


class DeviceTelemetry(Contract):
    """One accelerator while a training run lasted; None for what its driver does not tell."""

    index: NonNegativeInt
    name: str
    utilisation_mean: float | None = Field(description="Share of time with a kernel running.")
    utilisation_max: float | None
    peak_memory_bytes: NonNegativeInt | None
    temperature_max_c: float | None
    power_mean_w: float | None
    energy_j: float | None


class EnergyUse(Contract):
    """Joules of a training run, and how they are known; never made up."""

    joules: NonNegativeFloat | None = Field(description="None where nothing could be measured.")
    known_by: str = Field(description="What was measured or estimated, or why nothing could be.")
    estimated: bool = Field(default=False, description="True where no meter was read.")


class ResourceUse(Contract):
    """What a piece of work took: time of processors and devices, energy, and money."""

    seconds: NonNegativeFloat = Field(default=0.0, description="Wall seconds.")
    cpu_s: NonNegativeFloat = Field(default=0.0, description="CPU seconds of all its processes.")
    gpu_s: NonNegativeFloat = Field(default=0.0, description="Seconds that it held GPUs, each.")
    joules: NonNegativeFloat | None = Field(default=None, description="None where not known.")
    estimated: bool = Field(default=False, description="The energy was not read off a meter.")
    amount: NonNegativeFloat | None = Field(default=None, description="Money; None without prices.")
    currency: str = Field(default="EUR", description="ISO 4217 code.")

    def __add__(self, other: "ResourceUse") -> "ResourceUse":
        """Both together; what is not known of one is taken as nothing."""

        def known(one: float | None, two: float | None) -> float | None:
            return None if one is None and two is None else (one or 0.0) + (two or 0.0)

        return ResourceUse(
            seconds=self.seconds + other.seconds,
            cpu_s=self.cpu_s + other.cpu_s,
            gpu_s=self.gpu_s + other.gpu_s,
            joules=known(self.joules, other.joules),
            estimated=self.estimated or other.estimated,
            amount=known(self.amount, other.amount),
            currency=self.currency,
        )


Setting = bool | int | float | str


class Finding(Described):
    """One thing that holds a training run back, with its evidence."""

    kind: Literal["input", "communication", "compute", "memory", "imbalance"]
    share: float = Field(ge=0, le=1, description="Of the ranks' time in training steps.")
    evidence: str = Field(description="A sentence with the numbers.")
    advice: str = Field(description="A sentence: what to change, or that nothing can be.")
    suggestions: dict[str, Setting] = Field(default={})
    """Dotted field of the training configuration to a better value."""


class Diagnosis(Contract):
    """Where the time of a training run goes; the heaviest finding first, none when balanced."""

    summary: str
    findings: tuple[Finding, ...] = ()


class TrainingTelemetry(Contract):
    """What a training run took: time, memory, network and energy."""

    seconds: NonNegativeFloat = Field(description="Wall seconds, all attempts.")
    num_attempts: PositiveInt
    num_samples: NonNegativeInt = Field(description="Samples of the last attempt.")
    ranks: tuple[RankTelemetry, ...] = Field(description="Of the last attempt.")
    host: HostTelemetry
    devices: tuple[DeviceTelemetry, ...] = ()
    energy: EnergyUse
    diagnosis: Diagnosis | None = None

    _retired = retired("cost", "applied")
