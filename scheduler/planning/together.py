"""What a workload keeps in one stage, in sentences."""

from collections.abc import Iterator

from scheduler.problem.workload import Workload


def kept_together(workload: Workload) -> list[str]:
    """A sentence for each run of layers that no plan cuts, and why."""
    sentences = []
    for first, last in _runs(workload):
        layers = workload.layers[first:last]
        why = "; ".join(dict.fromkeys(one.shares for one in layers if one.shares))
        name = f"{workload.layers[first].name!r} to {workload.layers[last].name!r}"
        sentences.append(f"{name} stay in one stage: {why or 'the workload says so'}.")
    return sentences


def _runs(workload: Workload) -> Iterator[tuple[int, int]]:
    """The first and the last layer of each run, both of them in it."""
    first = 0
    for number, layer in enumerate(workload.layers):
        if not layer.uncut:
            if number > first:
                yield first, number
            first = number + 1
