"""The default use case on one month with a small model: a loop of a minute, for `--small`."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

FIRST_DAY = datetime(2013, 1, 1, 5, tzinfo=UTC)
"""Midnight of New York."""


def _days(first: int, count: int) -> dict[str, str]:
    start = FIRST_DAY + timedelta(days=first)
    return {"start": start.isoformat(), "end": (start + timedelta(days=count)).isoformat()}


SMALL: dict[str, Any] = {
    "window": _days(0, 31),
    "splits": {"train": _days(1, 13), "validation": _days(14, 8), "test": _days(22, 9)},
    "current": _days(22, 9),
    "recalibration": {"holdout_days": 9},
    "training": {"max_epochs": 6, "hidden_sizes": [32], "num_bins": 8},
    "shrinking": {"method": "pruning-distillation", "pruned_share": 0.5, "max_epochs": 4},
    "promotion": {
        "min_auc": 0.55,
        "max_plausible_auc": 0.85,
        "yardstick_margin": 0.2,
        "max_calibration_error": 0.3,
        "min_slice_auc": 0.2,
    },
}
"""What differs from `use_case.yaml`; gates are as wide as so few rows need."""
QUICK: dict[str, Any] = {
    "conversion": {
        "formats": ["onnx-fp32", "openvino-fp32"],
        "timing_rounds": 6,
        "round_ms": 2,
        "measure_memory": False,
    }
}
"""What a loop can do without that is only measured on."""


def small_repository(folder: Path) -> Path:
    """Copy the default use case into a folder and make it small; returns its feature repository."""
    repo = folder / "feature_repo"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT_ROOT / DEFAULT_FEATURE_REPO, repo, ignore=ignored)
    file = repo / "use_case.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | SMALL | QUICK))
    return repo
