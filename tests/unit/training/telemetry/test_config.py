from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tasks.training.telemetry.config import TelemetryConfig


@pytest.mark.parametrize("path", ["training.prom", "/var/lib/training.txt"])
def test_a_textfile_that_the_collector_would_not_read_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match=r"is not an absolute path that ends in \.prom"):
        TelemetryConfig(prometheus_textfile=Path(path))


@pytest.mark.parametrize(
    "change",
    [{"watts_per_core": -1}, {"currency": "euro"}, {"price_per_kwh": -1}],
)
def test_numbers_without_sense_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TelemetryConfig.model_validate(change)
