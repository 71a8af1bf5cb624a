"""What one conversion run is asked to do: formats, bounds on what they may change, how to time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)

from tasks.contracts.hardware import ClassName
from tasks.conversion.targets.catalog import FORMAT, PRECISIONS, format_of
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.values import Described

FORMATS_KEY = AliasChoices("formats", "targets")
"""`targets` was its name in earlier versions."""
TRITON_FILES = {"onnx": "model.onnx", "tensorrt": "model.plan"}
"""File formats that Triton serves, and the file of each, in a variant's folder and a repository."""


def _known_format(name: str) -> str:
    try:
        return format_of(name).name
    except ConfigurationError as exc:
        raise ValueError(str(exc)) from exc


FormatName = Annotated[
    str,
    AfterValidator(_known_format),
    WithJsonSchema({"type": "string", "enum": list(FORMAT)}),  # a choice, in a form
]


class QualityBound(Described):
    """How far a variant of one precision may be from the program it was made from."""

    max_gap: PositiveFloat = Field(le=1)
    """Largest difference of any single probability, 0 to 1; of a regression in standard deviations
    of the test rows' label; of embeddings 1 - cosine, or the change of their length."""
    mean_gap: PositiveFloat = Field(le=1, description="The same, mean over the test rows.")
    edge_gap: PositiveFloat | None = Field(default=None, le=1)
    """The same as `max_gap`, of rows that data rarely holds; None for equal."""
    quality_drop: NonNegativeFloat = Field(le=0.5)
    """AUC, R2 or neighbour overlap it may lose: the lower end
    of the 95 % interval of the change."""

    @model_validator(mode="after")
    def _mean_within_max(self) -> Self:
        if self.mean_gap > self.max_gap:
            raise ValueError(
                f"mean_gap={self.mean_gap} is above max_gap={self.max_gap}, so it bounds nothing; "
                "set it to at most max_gap"
            )
        return self


class TritonConfig(Described):
    """How Triton is to serve an accepted variant."""

    onnx_backend: Literal["onnxruntime", "python"] = "onnxruntime"
    """What runs ONNX: Triton's own backend, or ONNX Runtime of a Python that the server is given,
    where it was built without that backend (on processors alone)."""
    max_batch_rows: PositiveInt = Field(default=1024, le=65_536)
    """Rows of one execution; larger requests are refused."""
    max_wait_us: NonNegativeInt = Field(default=0, le=1_000_000)
    """Microseconds a request may wait for others."""
    timeout_ms: PositiveInt = Field(default=1000, le=600_000)
    """Milliseconds after which who waits is refused."""


class HardwareConversion(Described):
    """What is different where a conversion runs for another kind of machine."""

    hardware_class: ClassName = Field(description="Kind of machine that this is, such as `gpu`.")
    formats: tuple[FormatName, ...] | None = Field(
        default=None, min_length=1, validation_alias=FORMATS_KEY
    )
    """Variants to judge there; None: those of the use case."""
    triton: TritonConfig | None = None
    """How Triton is to serve what is accepted; None: not by Triton."""


class ConversionConfig(Described):
    """What one conversion run is asked to do."""

    formats: tuple[FormatName, ...] = Field(
        default=("onnx-fp32", "openvino-fp32", "openvino-int8"),
        min_length=1,
        validation_alias=FORMATS_KEY,
    )
    """Variants to judge. What a format is made from is built too."""
    hardware_class: ClassName = "cpu"
    """Hardware class the variants are measured on and for, see `hardware.yaml`."""
    bounds: Mapping[str, QualityBound] = Field(default={})
    """Bound by precision, where it is not to be that of the model's kind."""
    calibration_rows: PositiveInt = Field(default=2000, le=100_000)
    """Rows that show INT8 the value ranges."""
    batch_sizes: tuple[PositiveInt, ...] = Field(default=(1, 32, 1024), min_length=1)
    """Rows per call at which latency is taken."""
    minimum_gain: float = Field(default=1.05, ge=1, le=100)
    """Times faster than a simpler variant one must be, with 95 % confidence."""
    threads: PositiveInt = Field(default=1, le=256)
    """Threads of one runtime within one call."""
    measurement: Literal["full", "quick"] = "full"
    """`quick`: few and short timing rounds and no memory, to try things out."""
    price_per_core_hour: PositiveFloat = Field(default=0.04, le=1000)
    """Price of one core, of one GPU where the hardware class is one, for an hour, USD. Set your
    own: the default is about that of a small rented machine."""
    triton: TritonConfig | None = None
    """Write a model repository of each accepted variant that Triton serves."""

    @property
    def rounds(self) -> tuple[int, float]:
        """Interleaved timing rounds of each batch size, and the least length of a turn, ms."""
        return (15, 20.0) if self.measurement == "full" else (6, 1.0)

    @model_validator(mode="after")
    def _names_are_known_and_unique(self) -> Self:
        for name, values in (("formats", self.formats), ("batch_sizes", self.batch_sizes)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name}={values} names something twice; name each once")
        if unknown := [name for name in self.bounds if name not in PRECISIONS]:
            raise ValueError(
                f"bounds name {', '.join(unknown)}, which no format has; the precisions are "
                f"{', '.join(PRECISIONS)}"
            )
        return self

    def on(self, hardware: HardwareConversion | None) -> ConversionConfig:
        """The same conversion for another kind of machine; None for the one it names itself."""
        if hardware is None:
            return self
        given = hardware.model_dump(exclude={"formats"} if hardware.formats is None else set())
        return ConversionConfig.model_validate(self.model_dump() | given)
