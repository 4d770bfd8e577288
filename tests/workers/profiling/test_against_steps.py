"""Costs of layers against real steps, in hand-computed cases."""

import pytest

from protos.decision_pb2 import LayerCost
from workers.profiling.against_steps import besides, drop_waits, tell_delay
from workers.profiling.costs import Sizes

_SIZES = Sizes(step=64, micro_batch=32, rows=64)


@pytest.mark.parametrize(("step_s", "shrunk"), [(0.02, 0.5), (0.05, 1)])
def test_a_gpu_is_not_priced_with_waits_of_its_measurement(step_s: float, shrunk: float) -> None:
    """A step of two micro-batches whose layers took 20 ms one by one, hence 40 ms a step."""
    lines: list[str] = []
    costs = [LayerCost(compute_s=0.015), LayerCost(compute_s=0.005)]
    drop_waits(costs, step_s, _SIZES, lines.append)
    assert [cost.compute_s for cost in costs] == pytest.approx([0.015 * shrunk, 0.005 * shrunk])
    assert lines == (["layers one by one take 100% more than in a step"] if shrunk != 1 else [])


def test_what_passes_until_rows_have_a_gradient_is_shared_by_what_they_take() -> None:
    """10 ms a step are 5 of a micro-batch, 2 of which their moving tells."""
    costs = [LayerCost(sync_s=0.0005), LayerCost(sync_s=0.0015)]
    tell_delay(costs, 0.010, _SIZES, lambda line: None)
    assert [cost.delay_s for cost in costs] == pytest.approx([0.00075, 0.00225])


@pytest.mark.parametrize(
    ("staleness", "told_s"),
    [(1, 0.020), (0, 0.022)],  # two steps under way; one, with its rows
)
def test_the_executors_share_is_what_layers_do_not_tell(staleness: int, told_s: float) -> None:
    costs = [LayerCost(compute_s=0.004, sync_s=0.001), LayerCost(compute_s=0.006)]
    share, each = besides(costs, 0.024, 0.0005, staleness, _SIZES, lambda line: None)
    assert share == pytest.approx(1 - told_s / 0.025)
    assert each == pytest.approx((0.025 - told_s) / 2)
    assert besides(costs, 0.0, 0.0, staleness, _SIZES, lambda line: None) == (0.0, 0.0)
    assert besides(costs, 0.015, 0.0, staleness, _SIZES, lambda line: None) == (0.0, 0.0)
