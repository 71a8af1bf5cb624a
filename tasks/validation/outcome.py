"""What one suite found on one table: the document that is kept as `validation.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ArtifactError
from tasks.validation.suites import Severity

Status = Literal["passed", "failed", "warned", "skipped"]


class _OutcomeValue(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckOutcome(_OutcomeValue):
    """One expectation: what it says and what was seen."""

    entry: int = Field(ge=1, description="Place of its rule in the suite, from 1.")
    type: str
    table: str
    columns: tuple[str, ...]
    says: str
    severity: Severity
    status: Status
    observed: str = Field(description="What was seen, in a few words.")
    sentence: str = Field(default="", description="The failure in words; empty where it holds.")


class SuiteOutcome(_OutcomeValue):
    """A whole suite on one table. Holds no clock and no run id: same data, same document."""

    suite: str
    subject: str
    subject_sha256: str
    window: TimeWindow
    num_rows: NonNegativeInt
    passed: bool
    great_expectations_version: str
    column_types: dict[str, str] = Field(description="Column to DuckDB type, as stored.")
    table_faults: tuple[str, ...] = Field(
        description="What is wrong with the table as such; with any of these no value was judged."
    )
    looks_like: tuple[str, ...] = Field(
        default=(), description="Kinds of fault that the failures look like, in words."
    )
    checks: tuple[CheckOutcome, ...]
    results: tuple[dict[str, Any], ...] = Field(
        description="The Great Expectations results, whole, one for each judged check."
    )

    @property
    def num_judged(self) -> int:
        """Checks that were judged, not skipped."""
        return sum(check.status != "skipped" for check in self.checks)

    def with_status(self, status: Status) -> tuple[CheckOutcome, ...]:
        """The checks that ended so."""
        return tuple(check for check in self.checks if check.status == status)


def read_outcome(path: Path) -> SuiteOutcome:
    """Read a kept `validation.json`.

    Raises:
        ArtifactError: the file is no outcome of this version of the project.
    """
    try:
        return SuiteOutcome.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ArtifactError(
            f"{path} is no validation result that this version of the project can read; run the "
            "validation again"
        ) from exc
