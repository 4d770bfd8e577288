"""AUC and log-loss against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.learning.quality import auc, logloss, measure


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auc_counts_pairs(rows):
    scores = np.array([s for s, _ in rows], np.float32)
    labels = np.array([y for _, y in rows], np.float32)
    positive, negative = scores[labels == 1], scores[labels == 0]
    if not len(positive) or not len(negative):
        assert np.isnan(auc(scores, labels))
        return
    pairs = positive[:, None] - negative[None, :]
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert auc(scores, labels) == pytest.approx(expected)


@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.booleans(), st.sampled_from([0.0, 0.5, 2.0])),
        min_size=2,
        max_size=30,
    )
)
def test_a_sample_counts_as_often_as_its_weight_says(rows):
    """Metrics with whole weights are those of samples that are there so many times."""
    scores = np.array([s for s, _, _ in rows], np.float32)
    labels = np.array([y for _, y, _ in rows], np.float32)
    weights = np.array([w for _, _, w in rows], np.float32)
    times = (2 * weights).astype(int)
    for loss in ("bce_with_logits", "mse", "mae", "cross_entropy", "next_token"):
        found = measure(loss, scores, labels, "test", weights)
        expected = measure(loss, np.repeat(scores, times), np.repeat(labels, times), "test")
        assert found == pytest.approx(expected, nan_ok=True)


def test_logloss_is_stable_for_large_logits():
    logits = np.array([1000.0, -1000.0, 0.0], np.float32)
    labels = np.array([1.0, 0.0, 1.0], np.float32)
    assert logloss(logits, labels) == pytest.approx(np.log(2) / 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("loss", ["bce_with_logits", "mse", "next_token"])
def test_metrics_of_scores_that_are_not_finite_are_not_numbers(bad, loss):
    scores, labels = np.array([0.5, bad, -1.0], np.float32), np.array([1, 0, 1], np.float32)
    assert np.isnan(auc(scores, labels))
    assert np.isnan(logloss(scores, labels))
    measured = measure(loss, scores, labels, "test")
    assert measured
    assert all(np.isnan(value) for value in measured.values())
    assert all(np.isnan(value) for value in measure(loss, scores[:0], labels[:0], "test").values())
