"""Windows of scheduled runs: a schedule says when, the use case's clock says which window."""

from datetime import UTC, datetime, time, timedelta
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field

from tasks.contracts.base import TimeWindow
from tasks.kernel.values import Described


def _is_a_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise ValueError(
            f"{name!r} is no time zone; expected such as UTC or America/New_York"
        ) from exc
    return name


TimeZone = Annotated[str, AfterValidator(_is_a_zone)]


class ClockConfig(Described):
    """What time it is for a use case, and how long its scheduled windows are."""

    replay_year: int | None = Field(default=None, ge=1970, le=2200)
    """Year of recorded data that is played back: the clock shows today's date and time in that
    year, again each year. None: the data is live."""
    time_zone: TimeZone = Field(default="UTC", description="Where the use case's days begin.")
    label_hours: float = Field(default=0.0, ge=0, le=24 * 366)
    """The label of a moment is known so many hours later: windows of drift checks and trainings end
    before the days that wait for theirs."""
    refresh_hours: int = Field(default=48, ge=1, le=24 * 366)
    """A scheduled refresh reaches back so many hours from the newest complete one: late rows and
    hours in which nothing ran are taken up by the next."""
    drift_days: int = Field(default=28, ge=1, le=3660)
    """Complete days that a scheduled drift check looks at."""
    min_train_days: int = Field(default=28, ge=1, le=3660)
    """With fewer days, a rolled training is refused."""
    validation_days: int = Field(default=28, ge=1, le=3660)
    """Validation window of a rolled training, days."""
    test_days: int = Field(default=28, ge=1, le=3660)
    """Test window of a rolled training, days."""

    def shows(self, moment: datetime) -> datetime:
        """The use case's time at a moment of the real world, UTC.

        In a year without it, February 29 is shown as the 28th.
        """
        moment = moment.astimezone(UTC)
        if self.replay_year is None:
            return moment
        try:
            return moment.replace(year=self.replay_year)
        except ValueError:
            return moment.replace(year=self.replay_year, day=28)

    def newest(self, moment: datetime, span: timedelta, *, labelled: bool = False) -> TimeWindow:
        """So much up to the newest whole hour, or up to the newest whose labels are known."""
        settled = self.shows(moment) - timedelta(hours=self.label_hours if labelled else 0)
        end = settled.replace(minute=0, second=0, microsecond=0)
        return TimeWindow(start=end - span, end=end)

    def newest_hours(self, moment: datetime) -> TimeWindow:
        """The newest `refresh_hours` whole hours."""
        return self.newest(moment, timedelta(hours=self.refresh_hours))

    def newest_days(self, moment: datetime) -> TimeWindow:
        """The newest `drift_days` whole days, in the use case's zone, whose labels are known."""
        return TimeWindow(start=self.day(moment, self.drift_days), end=self.day(moment))

    def newest_labelled(self, moment: datetime) -> TimeWindow:
        """As many days as `drift_days`, up to the newest whole hour whose labels are known."""
        return self.newest(moment, timedelta(days=self.drift_days), labelled=True)

    def day(self, moment: datetime, before: int = 0) -> datetime:
        """Begin of the first day that is not complete, or of one so many days before it, UTC.

        Such a day may have 23 or 25 hours.
        """
        zone = ZoneInfo(self.time_zone)
        settled = self.shows(moment) - timedelta(hours=self.label_hours)
        date = settled.astimezone(zone).date() - timedelta(days=before)
        return datetime.combine(date, time.min, zone).astimezone(UTC)
