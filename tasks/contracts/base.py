"""Values that all rooms know: windows of time, model versions, and the base of the others."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Self

from pydantic import AliasChoices, Field, PositiveInt, model_validator

from tasks.kernel.errors import WindowError
from tasks.kernel.values import Artifact as Artifact
from tasks.kernel.values import Contract as Contract
from tasks.kernel.values import field_title as field_title
from tasks.kernel.values import retired as retired

RESULT, RESULT_ID = AliasChoices("result", "verdict"), AliasChoices("result_id", "verdict_id")
"""Names of fields, and those that values stored before 2026-11-24 have."""


class TimeWindow(Contract):
    """Half-open window [start, end) in UTC."""

    start: datetime = Field(description="First moment inside the window, with a time zone.")
    end: datetime = Field(description="First moment after the window, with a time zone.")

    @model_validator(mode="after")
    def _is_a_window(self) -> Self:
        for name, moment in (("start", self.start), ("end", self.end)):
            if moment.tzinfo is None:
                raise ValueError(
                    f"window {name} {moment.isoformat()} has no time zone; write it in UTC, for "
                    f"example {moment.isoformat()}+00:00"
                )
        if self.end <= self.start:
            kind = "empty" if self.end == self.start else "reversed"
            raise ValueError(
                f"window [{self.start.isoformat()}, {self.end.isoformat()}) is {kind}; expected "
                "start before end. Nothing was touched"
            )
        object.__setattr__(self, "start", self.start.astimezone(UTC))
        object.__setattr__(self, "end", self.end.astimezone(UTC))
        return self

    def check_not_in_future(self, now: datetime) -> None:
        """Refuse a window that ends after `now`: its data cannot be complete.

        Raises:
            WindowError: the window ends in the future.
        """
        if self.end > now:
            raise WindowError(
                f"window {self} ends in the future (now is {now:%Y-%m-%dT%H:%MZ}); expected an end "
                "at or before now, because later rows do not exist yet. Nothing was touched"
            )

    def contains(self, other: TimeWindow) -> bool:
        """True where `other` lies wholly inside this window."""
        return self.start <= other.start and other.end <= self.end

    def __str__(self) -> str:
        return f"{self.start:%Y-%m-%dT%H:%MZ} to {self.end:%Y-%m-%dT%H:%MZ}"

    @property
    def slug(self) -> str:
        """Short form for names, such as `20130101-20140101`."""
        return f"{self.start:%Y%m%d}-{self.end:%Y%m%d}"


class ModelVersionRef(Contract):
    """One version in the model registry."""

    name: str = Field(description="Registered model.")
    version: PositiveInt = Field(description="Its number, counted from 1.")
    run_id: str = Field(description="MLflow run that made it.")
    program_sha256: str = Field(description="Digest of the exported program.")
    snapshot_sha256: str = Field(description="Digest of the rows it was trained on.")
