"""Quality of predictions on held-out data."""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from workers.learning.losses import BINARY

Values = NDArray[np.float32]


def auc(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Area under the ROC curve: ties count half; NaN when only one class is there.

    NaN, too, when a score is not finite: it has no place in an order.

    Args:
        weights: what a sample counts; None: 1. A pair counts the product.
    """
    if not np.isfinite(scores).all():
        return math.nan
    order = np.argsort(scores, kind="stable")
    sorted_scores = scores[order]
    positive = (labels[order] > 0.5).astype(np.float64)
    each = np.ones(len(scores)) if weights is None else weights[order].astype(np.float64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(sorted_scores)) + 1))
    above, below = (  # of each score that occurs, what its samples count
        np.add.reduceat(each * part, starts) if len(scores) else np.zeros(0)
        for part in (positive, 1 - positive)
    )
    pairs = above.sum() * below.sum()
    won = above * (np.cumsum(below) - below / 2)
    return float(won.sum() / pairs) if pairs else math.nan


def logloss(logits: Values, labels: Values, weights: Values | None = None) -> float:
    """Mean binary cross-entropy of logits; NaN where one is not finite, or there is none."""
    if not len(logits) or not np.isfinite(logits).all():
        return math.nan
    x = logits.astype(np.float64)
    return _mean(np.maximum(x, 0) - x * labels + np.log1p(np.exp(-np.abs(x))), weights)


def measure(
    loss: str,
    scores: Values,
    labels: Values,
    prefix: str,
    weights: Values | None = None,
    *,
    by_column: bool = False,
) -> dict[str, float]:
    """The metrics that suit a loss, named PREFIX_metric; NaN where a score is not finite.

    Args:
        scores, labels: [n], or [n, …] of samples that have several labels, NaN where none counts;
            as of `workers.learning.losses.held_out`.
        weights: [n], what a sample counts; None: 1.
        by_column: of several labels the AUC is the mean of those of each place that has both
            classes; else one over all.
    """
    names = METRICS[loss or BINARY]
    if labels.ndim > 1:
        there = ~np.isnan(labels)
        each = None
        if weights is not None:
            each = np.broadcast_to(weights.reshape(-1, *[1] * (labels.ndim - 1)), labels.shape)
        own = None if each is None else each[there]
        found = measure(loss, scores[there], labels[there], prefix, own)
        if by_column and "auc" in names:
            found[f"{prefix}_auc"] = _mean_auc(scores, labels, each)
        return found
    if not len(scores) or not np.isfinite(scores).all():
        return {f"{prefix}_{name}": math.nan for name in names}
    return {f"{prefix}_{name}": _MEASURES[name](scores, labels, weights) for name in names}


def _mean_auc(scores: Values, labels: Values, weights: Values | None) -> float:
    """The mean over all places [n, …] that have both classes; NaN where none has."""
    found = []
    for place in np.ndindex(labels.shape[1:]):
        at = (slice(None), *place)
        there = ~np.isnan(labels[at])
        own = None if weights is None else weights[at][there]
        one, other = scores[at][there], labels[at][there]
        if not np.isfinite(one).all():
            return math.nan
        found.append(auc(one, other, own))
    several = [value for value in found if not math.isnan(value)]
    return float(np.mean(several)) if several else math.nan


def _mean(values: NDArray[Any], weights: Values | None) -> float:
    if weights is None:
        return float(np.mean(values, dtype=np.float64))
    return float(np.average(values, weights=weights)) if weights.any() else math.nan


def _nats(losses: Values, counts: Values, weights: Values | None) -> float:
    return _mean(losses, counts if weights is None else counts * weights)


# By loss, what is measured of held-out samples.
METRICS: Final[dict[str, tuple[str, ...]]] = {
    BINARY: ("auc", "logloss"),
    "cross_entropy": ("cross_entropy", "accuracy"),
    "mse": ("mse",),
    "mae": ("mae", "mse"),
    "huber": ("mae", "mse"),
    "next_token": ("loss", "bits_per_token"),
    "contrastive": ("cross_entropy", "accuracy"),
    "in_batch_softmax": ("cross_entropy", "accuracy"),
    "pairwise": ("loss",),
}
_MEASURES: Final[dict[str, Callable[[Values, Values, Values | None], float]]] = {
    "auc": auc,
    "logloss": logloss,
    "cross_entropy": lambda losses, _, weights: _mean(losses, weights),
    "accuracy": lambda _, right, weights: _mean(right, weights),
    "mse": lambda scores, labels, weights: _mean((scores - labels) ** 2, weights),
    "mae": lambda scores, labels, weights: _mean(np.abs(scores - labels), weights),
    "loss": _nats,
    "bits_per_token": lambda losses, counts, weights: _nats(losses, counts, weights) / math.log(2),
}
