from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from tasks.training.core.metrics import histogram_auc, score_histograms


@given(st.integers(0, 10_000), st.integers(4, 400), st.floats(0, 3))
def test_auc_agrees_with_scikit_learn(seed: int, num_rows: int, signal: float) -> None:
    rng = np.random.default_rng(seed)
    labels = (np.arange(num_rows) % 3 == 0).astype(np.float32)
    logits = rng.normal(size=num_rows) + signal * labels
    scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
    ours = histogram_auc(score_histograms(scores, labels))
    assert ours == pytest.approx(roc_auc_score(labels, scores), abs=2e-3)


def test_histograms_of_parts_add_up_and_extreme_scores_have_a_bin() -> None:
    scores = np.array([0.0, 0.25, 0.25, 1.0], dtype=np.float32)
    labels = np.array([0, 0, 1, 1], dtype=np.float32)
    whole = score_histograms(scores, labels)
    parts = score_histograms(scores[:1], labels[:1]) + score_histograms(scores[1:], labels[1:])
    assert np.array_equal(whole, parts)
    assert histogram_auc(whole) == (1 + 1 + 1 + 0.5) / 4
