"""Values about one run of the loop as a whole."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from tasks.contracts.base import Contract, ModelVersionRef
from tasks.contracts.data import FeatureRefresh, ValidatedDataset
from tasks.contracts.drift import DriftReport
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import ModelVariant, PromotionDecision
from tasks.contracts.training import TrainedModel
from tasks.kernel.values import Described


class StageRoute(Described):
    """Where a stage ran, and by which rule it was sent there."""

    wanted: str = Field(description="Hardware class that the configuration asks for.")
    taken: str = Field(description="`this process`, or the deployment that ran it.")
    pool: str | None = Field(default=None, description="Work pool of the deployment.")
    rule: Literal["in process", "wanted class", "fall back", "burst", "taken up again"]
    reason: str = Field(description="Why there, in a sentence.")
    refused: tuple[str, ...] = ()
    """Places that were asked before and why each was not taken."""
    flow_run: str | None = Field(default=None, description="Id of the run on the work pool.")
    price_per_hour: float | None = None
    """Of the pool of `burst`; times the stage's hours it is the bill."""


class StageTime(Contract):
    """Wall time of one stage of a run."""

    stage: str
    seconds: float
    reused: bool
    route: StageRoute | None = Field(default=None, description="Null in records before 2026-11-21.")


class RunRecord(Contract):
    """Everything one run of the loop did; the report shows it and `report.json` holds it."""

    use_case: str
    question: str
    run_id: str
    started: datetime
    code_commit: str
    host: dict[str, str] = Field(description="CPU, cores, memory, versions of named packages.")
    refresh: FeatureRefresh
    dataset: ValidatedDataset
    model: TrainedModel
    evaluation: EvaluationReport
    version: ModelVersionRef
    variants: tuple[ModelVariant, ...]
    promotion: PromotionDecision
    drift: DriftReport
    stages: tuple[StageTime, ...]
