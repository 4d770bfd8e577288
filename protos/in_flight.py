"""How many micro-batches a worker may have between forward and backward: planned with, and kept."""

from collections.abc import Sequence


def filling(units: Sequence[int], stage: int) -> int:
    """Micro-batches of a worker of a stage that are on their way where all have something to do.

    Through the stages from its own on and back, if these are equally fast in all.

    Args:
        units: workers of each stage.
    """
    return -(-sum(units[stage:]) // units[stage])


def most_in_flight(
    units: Sequence[int],
    stage: int,
    micro_batches: int,
    staleness: int,
    *,
    whole_batch: bool,
    lockstep: bool,
) -> int:
    """The most of a worker of a stage, never more than its share of the steps that may be begun.

    Twice what fills the stages: as many wait where workers meet out of turn.

    Args:
        units: workers of each stage.
        micro_batches: of a step.
        staleness: updates that a step lacks.
        whole_batch: whether the loss waits for all forwards of a step.
        lockstep: whether gates do: a stage before others may have to compute all of them before it
            hears of any backward.
    """
    at_once = whole_batch or (lockstep and stage < len(units) - 1)
    most = -(-micro_batches // units[stage]) * (staleness + 1)
    return most if at_once else min(2 * filling(units, stage), most)
