"""Quality of predictions on held-out data."""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workers.learning.losses import BINARY


def auc(scores: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Area under the ROC curve: ties count half; NaN when only one class is there.

    NaN, too, when a score is not finite: it has no place in an order.
    """
    if not np.isfinite(scores).all():
        return float("nan")
    order = np.argsort(scores, kind="stable")
    sorted_scores = scores[order]
    positive = labels[order] > 0.5
    edges = np.flatnonzero(np.diff(sorted_scores)) + 1
    starts = np.concatenate(([0], edges))
    ends = np.concatenate((edges, [len(scores)]))
    mean_rank = (starts + ends + 1) / 2  # ranks from 1, shared by equal scores
    ranks = np.repeat(mean_rank, ends - starts)
    positives = int(positive.sum())
    negatives = len(scores) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    return float(
        (ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    )


def logloss(logits: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Mean binary cross-entropy of logits; NaN where one is not finite, or there is none."""
    if not len(logits) or not np.isfinite(logits).all():
        return float("nan")
    x = logits.astype(np.float64)
    return float(np.mean(np.maximum(x, 0) - x * labels + np.log1p(np.exp(-np.abs(x)))))


def measure(
    loss: str, scores: NDArray[np.float32], labels: NDArray[np.float32], prefix: str
) -> dict[str, float]:
    """The metrics that suit a loss, named PREFIX_metric; NaN where a score is not finite.

    Args:
        scores, labels: [n], as of `workers.learning.losses.held_out`.
    """
    names = METRICS[loss or BINARY]
    if not len(scores) or not np.isfinite(scores).all():
        return {f"{prefix}_{name}": math.nan for name in names}
    return {f"{prefix}_{name}": _MEASURES[name](scores, labels) for name in names}


def _nats(losses: NDArray[np.float32], counts: NDArray[np.float32]) -> float:
    return float(np.average(losses, weights=counts)) if counts.any() else math.nan


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
_MEASURES: Final[dict[str, Callable[[NDArray[np.float32], NDArray[np.float32]], float]]] = {
    "auc": auc,
    "logloss": logloss,
    "cross_entropy": lambda losses, _: float(losses.astype(np.float64).mean()),
    "accuracy": lambda _, right: float(right.mean(dtype=np.float64)),
    "mse": lambda scores, labels: float(np.mean((scores - labels) ** 2)),
    "mae": lambda scores, labels: float(np.mean(np.abs(scores - labels), dtype=np.float64)),
    "loss": _nats,
    "bits_per_token": lambda losses, counts: _nats(losses, counts) / math.log(2),
}
