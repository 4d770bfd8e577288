"""The costs of layers held against real steps: what a step takes that no layer tells."""

from collections.abc import Callable, Sequence

from protos.decision_pb2 import LayerCost
from workers.profiling.costs import Sizes

Log = Callable[[str], None]


def drop_waits(costs: Sequence[LayerCost], step_s: float, sizes: Sizes, log: Log) -> None:
    """Take from a GPU's layers what only measuring them one by one takes.

    The host waits for the GPU after each part of a layer then; in a step it is ahead of it.
    """
    compute_s = sum(cost.compute_s for cost in costs) / sizes.of_step
    if not 0 < step_s < compute_s:
        return
    for cost in costs:
        cost.compute_s *= step_s / compute_s
    log(f"layers one by one take {compute_s / step_s - 1:.0%} more than in a step")


def tell_delay(costs: Sequence[LayerCost], rows_s: float, sizes: Sizes, log: Log) -> None:
    """Have layers with rows tell what passes besides until rows have a step's gradient."""
    sync_s = sum(cost.sync_s for cost in costs)
    delay_s = rows_s * sizes.of_step - sync_s
    if rows_s:
        log(f"{rows_s * 1e3:.2f} ms from a step's gradient to rows that have it")
    if delay_s > 0 and sync_s > 0:
        for cost in costs:
            cost.delay_s = delay_s * cost.sync_s / sync_s


def besides(
    costs: Sequence[LayerCost],
    step_s: float,
    handled_s: float,
    staleness: int,
    sizes: Sizes,
    log: Log,
) -> tuple[float, float]:
    """What of a step on one core the costs of its layers do not tell: a share, and seconds.

    The seconds are of a micro-batch.

    Args:
        handled_s: of a micro-batch, what another core did meanwhile.
    """
    compute_s = sum(cost.compute_s for cost in costs)
    sync_s = sum(cost.sync_s for cost in costs)
    # As many steps as may be under way together take at least one's way from end to end.
    whole_s = compute_s + sync_s + sum(cost.delay_s for cost in costs)
    told_s = max(compute_s, sync_s, whole_s / (staleness + 1)) / sizes.of_step
    if not step_s:
        return 0.0, 0.0
    step_s += handled_s / sizes.of_step
    overhead = max(0.0, 1 - told_s / step_s)
    each = (step_s - told_s) * sizes.of_step
    log(
        f"a step takes {step_s * 1e3:.2f} ms, its layers {told_s * 1e3:.2f} ms: "
        f"{each * 1e3:+.2f} ms a micro-batch, {overhead:.1%} besides"
    )
    return overhead, max(0.0, each)
