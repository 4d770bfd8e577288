"""Metrics of a job by the data that they were found on."""

from collections.abc import Mapping


def metrics_by_split(metrics: Mapping[str, float]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Names of the metrics, and a row a split: `test_auc` stands in row test, column auc."""
    splits: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        split, _, metric = name.partition("_")
        splits.setdefault(split if metric else "", {})[metric or name] = value
    names = list(dict.fromkeys(metric for values in splits.values() for metric in values))
    return names, [
        (split, *(f"{values[name]:.4f}" if name in values else "" for name in names))
        for split, values in splits.items()
    ]
