from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.config import read_pipeline_config
from flows.drift_check import columns_with_unit
from tasks.evaluation.drift.compare import compare_windows
from tasks.evaluation.drift.config import DriftConfig
from tasks.evaluation.drift.task import feature_rows, verdict_text
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore
from tests.support.data import builders
from tests.support.evaluation.windows import scored


def test_what_the_artifacts_say_comes_from_the_report(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    dataset = builders.dataset(store)
    train, validation, current = builders.month(1, 6), builders.month(7, 2), builders.month(9)
    report = compare_windows(
        dataset,
        train,
        dataset,
        current,
        scored(store, dataset, validation),
        scored(store, dataset, current),
        DriftConfig(replicates=100),
        store,
    )
    rows = feature_rows(report)
    assert len(rows) == 9
    effects = [float(row["effect"]) for row in rows]
    assert effects == sorted(effects, reverse=True)
    text = verdict_text(report)
    assert text.startswith(f"**stable**: {report.num_current_rows:,} rows of 2013-09-01T00:00Z")
    assert all(f"- {sentence}" in text for sentence in report.evidence)


def test_bins_that_do_not_nest_are_refused_with_the_fix() -> None:
    with pytest.raises(ValidationError, match="no multiple of psi_bins=30"):
        DriftConfig(num_bins=100, psi_bins=30)


def test_columns_with_a_unit_are_those_of_the_suites_as_the_training_set_calls_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo = PROJECT_ROOT / "feature_repo" / "flights"
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(repo))
    with_unit = columns_with_unit(read_pipeline_config(repo))
    assert {"distance", "weather__temp", "weather__visib"} <= set(with_unit)
    assert not any("landed" in name for name in with_unit)
