"""Values about what was measured of a variant, and what it was chosen for."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from tasks.contracts.base import Contract
from tasks.contracts.evaluation import Metric


class VariantLatency(Contract):
    """Latency of one variant at one batch size, one thread, against PyTorch eager beside it."""

    batch_rows: PositiveInt
    p50_ms: float
    p95_ms: float
    ratio_to_eager: float = Field(description="Median of paired ratios; below 1 is faster.")
    ratio_to_replaced: float | None = Field(
        default=None, description="Against the simpler variant it would replace, paired."
    )
    cpu_ms: float | None = Field(
        default=None, description="Processor time of a call, all threads: median of the rounds."
    )
    cpu_ratio_to_eager: float | None = Field(
        default=None, description="The same as `ratio_to_eager`, of processor time."
    )


class VariantThroughput(Contract):
    """Rows a second of one variant when all cores ask it, each for calls of its own."""

    batch_rows: PositiveInt
    streams: PositiveInt = Field(description="Callers at the same time, each with a copy.")
    rows_per_s: Metric = Field(description="Median of the rounds and its 95 % interval.")
    cpu_s_per_million: NonNegativeFloat = Field(description="Processor seconds, million rows.")


class VariantPrice(Contract):
    """What answering costs on the measured hardware when all cores are busy."""

    per_million: NonNegativeFloat = Field(description="Rows, in `currency`.")
    per_core_hour: NonNegativeFloat = Field(description="As configured; of a GPU where it is one.")
    currency: str


class OperatorTime(Contract):
    """What one kind of operator costs in a call."""

    operator: str
    ms: NonNegativeFloat = Field(description="In a call, all of its kind together.")
    share: float = Field(ge=0, le=1, description="Of the time of all operators.")
    calls: NonNegativeInt = Field(description="How often it runs in a call.")


class OperatorProfile(Contract):
    """Which operators take the time of a call, the largest first."""

    batch_rows: PositiveInt
    total_ms: NonNegativeFloat = Field(description="Of all operators, those not listed too.")
    operators: tuple[OperatorTime, ...]


class GoalStanding(Contract):
    """Whether a variant was chosen for one goal on its hardware, and why or why not."""

    goal: str
    rule: str = Field(description="What the goal asks for, as a sentence.")
    figure: float | None = Field(description="What the rule compares; None where not measured.")
    unit: str
    chosen: bool
    reason: str
