"""What holds for all tests."""

import os
from pathlib import Path

import pytest

# Several test processes, each with a thread of OpenMP for every core, would mostly spin: half the
# time of the tests on two cores. Set before anything loads OpenMP; children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Files of minutes, begun first: one that is begun last is waited for on one core.
LONG = (
    "heterps/commands/test_train.py",
    "scheduler/service/test_service_job.py",
    "heterps/cluster/test_on_ray.py",
    "heterps/commands/test_train_modes.py",
    "ps/faults/test_chaos.py",
    "scheduler/runs/test_many_jobs.py",
    "scheduler/service/test_service.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    order = {here / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(LONG)))
