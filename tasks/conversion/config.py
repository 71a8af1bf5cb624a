"""What one conversion run is asked to do: targets, bounds on what they may change, how to time."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from tasks.contracts.base import field_title

VariantName = Literal["onnx-fp32", "openvino-fp32", "openvino-int8"]


class QualityBound(BaseModel):
    """How far a variant of one precision may be from the program it was made from."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    max_gap: PositiveFloat = Field(
        le=1,
        description="Largest difference of any single probability, 0 to 1; of a regression in "
        "standard deviations of the test rows' label, as the next one.",
    )
    mean_gap: PositiveFloat = Field(
        le=1, description="Mean difference of the probabilities of the test rows, 0 to 1."
    )
    auc_drop: NonNegativeFloat = Field(
        le=0.5,
        description="AUC (or R2) it may lose: the lower end of the 95 % interval of the change.",
    )

    @model_validator(mode="after")
    def _mean_within_max(self) -> Self:
        if self.mean_gap > self.max_gap:
            raise ValueError(
                f"mean_gap={self.mean_gap} is above max_gap={self.max_gap}, so it bounds nothing; "
                "set it to at most max_gap"
            )
        return self


class ConversionConfig(BaseModel):
    """What one conversion run is asked to do."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    targets: tuple[VariantName, ...] = Field(
        default=("onnx-fp32", "openvino-fp32", "openvino-int8"),
        min_length=1,
        description="Variants to judge. What a target is made from is built too.",
    )
    hardware_class: str = Field(
        default="cpu", min_length=1, description="Kind of machine the variants are measured for."
    )
    opset: int = Field(default=20, ge=18, le=23, description="ONNX operator set version.")
    fp32: QualityBound = Field(
        default=QualityBound(max_gap=1e-4, mean_gap=1e-5, auc_drop=1e-4),
        description="Bound for variants that compute in 32-bit floats.",
    )
    int8: QualityBound = Field(
        default=QualityBound(max_gap=0.05, mean_gap=0.005, auc_drop=0.001),
        description="Bound for variants that multiply in 8-bit integers.",
    )
    calibration_rows: PositiveInt = Field(
        default=2000, le=100_000, description="Training rows that show INT8 the value ranges."
    )
    quantized_layers: tuple[str, ...] = Field(
        default=("MatMul",),
        min_length=1,
        description="OpenVINO operations to quantise. All others, the encoding of raw numbers "
        "among them, stay in 32-bit floats.",
    )
    auc_replicates: PositiveInt = Field(
        default=1000,
        le=100_000,
        description="Bootstrap replicates (of days) for the change of AUC or R2.",
    )
    batch_sizes: tuple[PositiveInt, ...] = Field(
        default=(1, 32, 1024), min_length=1, description="Rows per call at which latency is taken."
    )
    timing_rounds: int = Field(
        default=15, ge=6, le=1000, description="Interleaved timing rounds for each batch size."
    )
    round_ms: PositiveFloat = Field(
        default=20.0, le=5000, description="Least length of one runtime's turn in a round, ms."
    )
    minimum_gain: float = Field(
        default=1.05,
        ge=1,
        le=100,
        description="Times faster than a simpler form a variant must be, with 95 % confidence.",
    )
    threads: PositiveInt = Field(
        default=1, le=256, description="Threads of one runtime within one call."
    )
    seed: NonNegativeInt = Field(
        default=0, description="Seed of the calibration sample, edge rows and bootstrap."
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for name, values in (("targets", self.targets), ("batch_sizes", self.batch_sizes)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name}={values} names something twice; name each once")
        return self

    def bound(self, precision: str) -> QualityBound:
        """The bound for variants of `precision`, `fp32` or `int8`."""
        return self.int8 if precision == "int8" else self.fp32
