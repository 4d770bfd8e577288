"""What workers report, in the status of their job."""

from protos.scheduler_pb2 import JobStatus, ProgressReport


def forget_validated(status: JobStatus) -> None:
    """Leave out what was measured after the step that the job goes on from."""
    kept = [one for one in status.validated if one.step <= status.step]
    del status.validated[:]
    status.validated.extend(kept)


def take_progress(status: JobStatus, report: ProgressReport) -> None:
    """Make a worker's progress that of its job, which never goes back by it."""
    status.phase = report.phase
    status.step = max(status.step, report.step)
    status.total_steps = report.total_steps or status.total_steps
    status.samples = max(status.samples, report.samples)
    if report.loss:
        status.loss = report.loss
        status.loss_terms.clear()
        status.loss_terms.update(report.loss_terms)
    if report.samples_per_s:
        status.samples_per_s = report.samples_per_s
    status.metrics.update(report.metrics)
    if report.validated:
        del status.validated[:]
        status.validated.extend(report.validated)
    status.output = report.output or status.output
