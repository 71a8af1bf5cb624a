"""Values about a map of a model's scores that was fitted anew, the network left as it was."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt

from tasks.contracts.base import Contract, ModelVersionRef, TimeWindow


class Calibrator(Contract):
    """A rising straight line: of a classification over the logit, of a regression over the score.

    A rising map keeps the order of all scores.
    """

    slope: float = Field(gt=0, allow_inf_nan=False, description="Above 0: the order stays.")
    intercept: float = Field(
        allow_inf_nan=False, description="In logits, or in the unit of the label."
    )

    def after(self, earlier: Calibrator) -> Calibrator:
        """The one map that equals `earlier` and then this one."""
        return Calibrator(
            slope=self.slope * earlier.slope,
            intercept=self.slope * earlier.intercept + self.intercept,
        )


class MapFit(Contract):
    """A map and the rows that it was fitted to."""

    map: Calibrator
    slope_error: float = Field(
        ge=0, description="Standard error; rows of one day count as one observation."
    )
    intercept_error: float = Field(ge=0, description="The same, of the intercept.")
    window: TimeWindow
    num_rows: PositiveInt = Field(description="Labelled rows.")
    num_positives: NonNegativeInt | None = Field(
        default=None, description="Rows with label 1, of a classification."
    )


class FitOutcome(Contract):
    """A fitted map, or why there is none."""

    fit: MapFit | None
    refusal: str | None = Field(default=None, description="A sentence; None where there is a map.")


class Calibration(Contract):
    """How a version's scores came from those of another one."""

    source: ModelVersionRef = Field(description="Version whose program was mapped.")
    fit: MapFit = Field(description="The map from the source's scores to this version's.")
    whole_map: Calibrator = Field(
        description="From the network's own output to this version's: earlier maps, and of a "
        "regression the label's scale, are in it."
    )
