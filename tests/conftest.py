"""What holds for all tests."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Several test processes, each with a thread of OpenMP for every core, would mostly spin: half the
# time of the tests on two cores. Set before anything loads OpenMP; children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HETERPS_PROFILES", "off")  # what is measured is not to come from before

# How long an example takes depends on what else runs: no test fails by it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Files of minutes, begun first: one that is begun last is waited for on one core.
LONG = (
    "heterps/commands/test_train.py",
    "scheduler/service/test_service_job.py",
    "heterps/cluster/test_on_ray.py",
    "heterps/commands/test_train_modes.py",
    "scheduler/runs/changes/test_regroup.py",
    "scheduler/runs/changes/test_regroup_in_saves.py",
    "ps/faults/test_chaos.py",
    "scheduler/runs/test_many_jobs.py",
    "workers/profiling/test_profiler.py",
    "ps/client/test_reshard.py",
    "heterps/cluster/test_security.py",
    "workers/node/test_restart.py",
    "scheduler/service/test_service.py",
    "bench/test_ps_bench.py",
)
# Files of which one process runs all: the cluster that they share takes long to start.
TOGETHER = dict.fromkeys(
    (
        "tests/scheduler/runs/changes/test_regroup.py",
        "tests/scheduler/runs/changes/test_regroup_in_saves.py",
    ),
    "tests/scheduler/runs/changes",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    order = {here / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile` has it, but for files that are to be together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return TOGETHER.get(scope, scope)

    return Scheduling(config, log)
