"""Small use cases of three kinds, each in a folder of its own: for tests of several at once."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from tasks.kernel.settings import PROJECT_ROOT

TRAFFIC = PROJECT_ROOT / "feature_repo" / "traffic"
THIRD = Path(__file__).with_name("third_use_case")
WEEKS = {
    "window": {"start": "2016-10-01T05:00:00Z", "end": "2017-03-01T06:00:00Z"},
    "splits": {
        "train": {"start": "2016-11-06T06:00:00Z", "end": "2017-01-08T06:00:00Z"},
        "validation": {"start": "2017-01-08T06:00:00Z", "end": "2017-01-29T06:00:00Z"},
        "test": {"start": "2017-01-29T06:00:00Z", "end": "2017-02-27T06:00:00Z"},
    },
    "current": {"start": "2017-01-29T06:00:00Z", "end": "2017-02-27T06:00:00Z"},
    "monitoring": {"baseline": {"start": "2016-11-06T06:00:00Z", "end": "2017-01-08T06:00:00Z"}},
    "training": {"max_epochs": 12, "global_batch_size": 128, "hidden_sizes": [32], "num_bins": 8},
    "baseline_model": {"max_iterations": 30, "min_leaf_rows": 20},
    "evaluation": {"slices": ["weekday"], "min_slice_rows": 80, "min_days": 3},
    "conversion": {"formats": ["onnx-fp32"], "measurement": "quick"},
    "promotion": {
        **{"min_r2": 0.5, "baseline_model_margin": 0.3, "min_skill": -5, "max_bias": 0.5},
        **{"max_slice_error_ratio": 5, "required_hardware": []},
    },
}
"""Windows of some weeks of the second use case, and gates as wide as they need."""


def small_traffic(folder: Path, **changes: Any) -> Path:
    """The second use case as it is, on some weeks; returns its feature repository."""
    return _copy(TRAFFIC, folder / "traffic", {**WEEKS, **changes})


def third_use_case(folder: Path, **changes: Any) -> Path:
    """The use case that only the tests have; returns its feature repository."""
    return _copy(THIRD, folder / "third", changes)


def _copy(source: Path, folder: Path, changes: dict[str, Any]) -> Path:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    described = yaml.safe_load((folder / "use_case.yaml").read_text())
    (folder / "use_case.yaml").write_text(yaml.safe_dump({**described, **changes}))
    return folder
