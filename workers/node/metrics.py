"""What a node shows to Prometheus: its units, and the processes of jobs that run on it."""

from collections import Counter
from collections.abc import Callable, Iterator

from chassis import loops
from chassis.loops import Loops
from chassis.metrics import Family, Metrics, Sample
from protos.scheduler_pb2 import NodeStatus

_UNITS = Family("heterps_node_units", "gauge", "Units that the node offers.", ("type",))
_USED = Family("heterps_node_units_used", "gauge", "Units that stage workers run on.", ("type",))
_PROCESSES = Family(
    "heterps_node_processes", "gauge", "Processes of jobs that run, by role.", ("role",)
)
FAMILIES = (_UNITS, _USED, _PROCESSES)
_ROLES = ("shard", "stage")


def node_metrics(status: Callable[[], NodeStatus], at_work: Loops) -> Metrics:
    """A node's metrics, read from its status."""
    metrics = Metrics()
    metrics.collect(FAMILIES, lambda: _samples(status()))
    metrics.collect(loops.FAMILIES, at_work.samples)
    return metrics


def _samples(status: NodeStatus) -> Iterator[Sample]:
    yield _UNITS, (status.type,), status.units
    yield _USED, (status.type,), status.units_used
    running = Counter(process.role for process in status.processes if process.running)
    for role in _ROLES:
        yield _PROCESSES, (role,), running[role]
