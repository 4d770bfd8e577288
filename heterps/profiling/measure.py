"""Profiling a model on this machine: a process for each type that is here, their costs together.

The processes are the ones that a node runs for a job, so a profile made by hand and the one that
the scheduler makes come from the same measurement.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chassis.exits import TOLD, exit_code_of
from chassis.process import describe_exit, module_argv
from heterps.errors import HeterpsError
from heterps.job import child
from heterps.profiling.present import is_cpu, present_types
from protos.decision_pb2 import Resources, Workload
from protos.job_pb2 import JobSpec
from protos.node_pb2 import ProfileRequest
from protos.scheduler_pb2 import END_INVALID_JOB

_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Args:
        units: cores to use at once at most; None for all.
        batch: the reference batch; 0 for the job's.
        bytes_per_s: of the network between hosts; 0 for what loopback does here.
        samples: that the workload trains; 0 for the job's.
    """

    units: int | None = None
    batch: int = 0
    bytes_per_s: float = 0.0
    samples: float = 0.0


def profile(
    job: JobSpec,
    resources: Resources,
    settings: Settings,
    on_line: Callable[[str], None] = lambda line: None,
) -> Workload:
    """Measure a job's layers on the types that are here and estimate the others.

    Args:
        on_line: told what is being done, from another thread.

    Raises:
        HeterpsError: it failed, with the reason that the process gave.
    """
    offered = Resources()
    offered.CopyFrom(resources)
    for kind in offered.types:
        kind.device = kind.device or ("cpu" if is_cpu(kind) else "cuda")
        kind.emulated = kind.name in job.schedule.emulate
    here = present_types(offered.types, set(job.schedule.emulate), settings.units)
    if not here:
        # Nothing of the kind is here: what a CPU core does tells the work, and all is estimated.
        offered.types[0].emulated = True
        here = {offered.types[0].name: 1}
    from scheduler.runs.offer import asked_of, merge

    measured = []
    for name, units in _turns(here):
        asked = asked_of(offered, name, here)
        request = ProfileRequest(job_id="profile", job=job, resources=asked)
        measured.append((name, _run(request, name, units, settings, on_line)))
    workload = merge(measured)
    if settings.samples:
        workload.samples = settings.samples
    return workload


def _turns(here: Mapping[str, int]) -> list[tuple[str, int]]:
    """Types one after the other, so that they do not disturb each other."""
    return list(here.items())


def _run(
    request: ProfileRequest,
    kind: str,
    units: int,
    settings: Settings,
    on_line: Callable[[str], None],
) -> Workload:
    with tempfile.TemporaryDirectory(
        prefix="heterps-profile-", ignore_cleanup_errors=True
    ) as folder:
        asked, result = Path(folder, "request"), Path(folder, "workload")
        asked.write_bytes(request.SerializeToString())
        argv = module_argv(
            "workers.profiling",
            *("--request", str(asked), "--result", str(result), "--type", kind),
            *("--units", str(units), "--batch", str(settings.batch)),
            *("--bytes-per-s", str(settings.bytes_per_s)),
        )
        # What it writes for the measurement lies here, too, and goes even where it is killed.
        threads = {one.name: one.threads or 1 for one in request.resources.types}
        environment = {**dict.fromkeys(_LIBRARIES, str(threads[kind])), "TMPDIR": folder}
        code, tail = child.follow("profile", argv, on_line, environment)
        if code != 0 or not result.exists():
            raise HeterpsError(_problem(code, tail))
        return Workload.FromString(result.read_bytes())


def _problem(code: int, tail: list[str]) -> str:
    """Why profiling failed: the last line names it; of a crash the lines before it, too."""
    lines = [line for line in tail if line.strip()]
    if code < 0 or not lines:
        return "\n".join([f"profiling ended {describe_exit(code)}", *lines])
    if code in (TOLD, exit_code_of(END_INVALID_JOB)):
        return f"profiling failed: {lines[-1].partition(': ')[2]}"
    return "\n".join(["profiling failed:", *lines])
