"""What the scheduler shows to Prometheus: jobs, the queue, nodes and their units."""

from collections import Counter
from collections.abc import Iterator

from chassis import loops
from chassis.loops import Loops
from chassis.metrics import Family, Metrics, Sample
from protos.scheduler_pb2 import QUEUED, RUNNING, JobState
from scheduler.state.jobs import Jobs
from scheduler.state.nodes import NODE, SHARD, Nodes

_JOBS = Family("heterps_scheduler_jobs", "gauge", "Jobs by state.", ("state",))
_QUEUE = Family("heterps_scheduler_queue_length", "gauge", "Jobs that wait.")
_NODES = Family("heterps_scheduler_nodes", "gauge", "Live nodes and standing shards.", ("kind",))
_UNITS = Family("heterps_scheduler_units", "gauge", "Units of live nodes.", ("type",))
_USED = Family("heterps_scheduler_units_used", "gauge", "Units that jobs hold.", ("type",))
_STEPS = Family("heterps_job_steps", "gauge", "Steps that a running job has done.", ("job",))
_RATE = Family(
    "heterps_job_samples_per_second", "gauge", "Samples a running job trains on.", ("job",)
)
_LOSS = Family("heterps_job_loss", "gauge", "A running job's loss.", ("job",))
FAMILIES = (_JOBS, _QUEUE, _NODES, _UNITS, _USED, _STEPS, _RATE, _LOSS)
_STATES = tuple(value for value in JobState.values() if value != JobState.JOB_UNSPECIFIED)


def scheduler_metrics(jobs: Jobs, nodes: Nodes, at_work: Loops) -> Metrics:
    """The scheduler's metrics, read from what it holds in memory."""
    metrics = Metrics()
    metrics.collect(FAMILIES, lambda: _samples(jobs, nodes))
    metrics.collect(loops.FAMILIES, at_work.samples)
    return metrics


def _samples(jobs: Jobs, nodes: Nodes) -> Iterator[Sample]:
    statuses = jobs.all()
    states = Counter(status.state for status in statuses)
    for state in _STATES:
        yield _JOBS, (JobState.Name(state).lower(),), states[state]
    yield _QUEUE, (), states[QUEUED]
    for status in statuses:
        if status.state == RUNNING:
            job = (status.job_id,)
            yield _STEPS, job, status.step
            yield _RATE, job, status.samples_per_s
            if status.step:
                yield _LOSS, job, status.loss
    live = nodes.listed()
    for kind in (NODE, SHARD):
        yield _NODES, (kind,), sum(status.kind == kind for status in live)
    units: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for node in live:
        if node.kind == NODE:
            units[node.type] += node.units
            used[node.type] += node.units_used
    for name in sorted(units):
        yield _UNITS, (name,), units[name]
        yield _USED, (name,), used[name]
