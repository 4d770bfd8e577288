"""Plans of the files that are shipped, which say nothing of steps: as of the first cost model."""

import pytest

from scheduler import load_resources, load_workload, plan
from tests.scheduler.instances import EXAMPLE

_PLANS = {
    0.0: (552_617, 4.58, 2.30, "cpu t4 v100 cpu", 3),
    600_000.0: (1_092_979, 9.47, 2.41, "cpu t4 v100 cpu", 5),
    1_200_000.0: (1_237_495, 11.39, 2.56, "cpu t4 v100 cpu", 5),
    1_250_000.0: (1_260_049, 11.70, 2.58, "cpu t4 v100 cpu", 6),
    1_300_000.0: (1_590_721, 14.91, 2.60, "cpu t4 v100 cpu", 7),
    2_374_600.0: (2_374_624, 37.49, 4.39, "cpu t4 v100 t4 v100 cpu t4", 10),
}


@pytest.mark.parametrize("floor", _PLANS)
def test_plans_stay_as_they_were(floor: float) -> None:
    work, offer = (
        load_workload(EXAMPLE / "workload.yaml"),
        load_resources(EXAMPLE / "resources.yaml"),
    )
    throughput, price, cost, types, servers = _PLANS[floor]
    found = plan(work, offer, floor or None, "exact")
    assert found.proven
    assert (round(found.throughput), round(found.plan.price_per_hour, 2)) == (throughput, price)
    assert round(found.cost, 2) == cost
    assert " ".join(stage.type for stage in found.stages) == types
    assert found.plan.ps_units == servers
    if floor == 600_000.0:
        assert [stage.units for stage in found.stages] == [20, 9, 2, 12]
