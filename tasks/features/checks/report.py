"""What the checks of this package report: parity, and snapshots made again. Without Feast."""

from datetime import datetime

from pydantic import Field, NonNegativeInt

from tasks.contracts.base import RESULT
from tasks.kernel.values import Described


class ParityDifference(Described):
    """One value that is not the same online and offline."""

    view: str
    feature: str
    entity: dict[str, str] = Field(description="Key column to value.")
    online: str | None
    offline: str | None
    online_event_time: datetime | None = Field(description="Of the row that is stored online.")
    offline_event_time: datetime | None
    """Of the newest row before the watermark in the feature table."""
    moment: datetime = Field(description="Moment at which both were asked.")


class ViewParity(Described):
    """Online against offline values of one view."""

    view: str
    watermark: datetime = Field(description="The store holds what happened before this moment.")
    num_entities: NonNegativeInt = Field(description="Entities that were compared.")
    num_values: NonNegativeInt
    num_differing: NonNegativeInt = Field(description="Values that are not exactly equal.")
    num_null: NonNegativeInt = Field(description="Values that are null on both sides.")
    num_stale: NonNegativeInt = Field(description="Entities blanked on both sides by the TTL.")
    num_overtaken: NonNegativeInt
    """Entities drawn but not compared: a row that arrived late was known only after a newer one, so
    no moment shows it offline."""


class ParityReport(Described):
    """Whether the online store gives what historical retrieval gives at the same moments."""

    feature_service: str
    tables_version: str
    seed: NonNegativeInt
    views: tuple[ViewParity, ...]
    examples: tuple[ParityDifference, ...]
    result: str = Field(pattern="^(equal|different|nothing compared)$", validation_alias=RESULT)
    evidence: tuple[str, ...] = Field(description="The result in sentences, one a view at fault.")


class SnapshotVerification(Described):
    """Outcome of making a snapshot again from what it pins."""

    snapshot_sha256: str
    rebuilt_sha256: str | None = Field(description="None where it could not be made again.")
    differences: tuple[str, ...] = Field(description="What differs, or why it could not be made.")
    remarks: tuple[str, ...] = Field(description="What has changed since, and does not matter.")

    @property
    def same(self) -> bool:
        """True where the same bytes came out."""
        return self.rebuilt_sha256 == self.snapshot_sha256
