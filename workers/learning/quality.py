"""Quality of predictions on held-out data."""

import math

import numpy as np
from numpy.typing import NDArray


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
    """The metrics that suit a loss, named PREFIX_metric; NaN where a score is not finite."""
    if not len(scores) or not np.isfinite(scores).all():
        scores = np.full(max(1, len(scores)), np.nan, np.float32)
        labels = np.ones_like(scores)
    if loss == "mse":
        return {f"{prefix}_mse": float(np.mean((scores - labels) ** 2))}
    if loss == "next_token":
        nats = float(np.average(scores, weights=labels)) if len(scores) else float("nan")
        return {f"{prefix}_loss": nats, f"{prefix}_bits_per_token": nats / math.log(2)}
    return {f"{prefix}_auc": auc(scores, labels), f"{prefix}_logloss": logloss(scores, labels)}
