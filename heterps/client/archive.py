"""The records of jobs whose cluster is gone: `train` keeps them, `inspect` and `logs` read them."""

from collections.abc import Iterable
from pathlib import Path

from chassis.files import replace_file
from heterps.client.records import Job, JobDecision, LogText, PlanUse
from heterps.home.local import home
from protos.decision_pb2 import Decision
from protos.scheduler_pb2 import JobStatus, PlanHistory
from protos.scheduler_pb2 import PlanUse as PlanUseMessage

_KEPT = 200  # jobs; the oldest go first


def add(
    status: JobStatus,
    decision: Decision | None,
    logs: Iterable[LogText],
    plans: Iterable[PlanUseMessage] = (),
) -> None:
    """Write a finished job's record."""
    folder = _folder() / status.job_id
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for chunk in logs:
        name = chunk.process.replace("/", "-").replace(" ", "-") or "job"
        with (folder / "logs" / f"{name}.log").open("a") as stream:
            stream.write(chunk.text)
    if decision is not None:
        (folder / "decision.pb").write_bytes(decision.SerializeToString())
    (folder / "plans.pb").write_bytes(PlanHistory(plans=plans).SerializeToString())
    replace_file(folder / "status.pb", status.SerializeToString())
    for old in _ids()[:-_KEPT]:
        _remove(_folder() / old)


def jobs() -> list[Job]:
    """Kept jobs in the order of submission."""
    found = [Job.of(JobStatus.FromString(_path(i, "status.pb").read_bytes())) for i in _ids()]
    return sorted(found, key=lambda job: job.submitted_at)


def decision(job_id: str) -> Decision | None:
    """A kept job's decision; None when it came to none."""
    path = _path(job_id, "decision.pb")
    return Decision.FromString(path.read_bytes()) if path.is_file() else None


def plans(job_id: str) -> list[PlanUse]:
    """The plans that a kept job has trained under."""
    path = _path(job_id, "plans.pb")
    data = path.read_bytes() if path.is_file() else b""
    return [PlanUse.of(one) for one in PlanHistory.FromString(data).plans]


def decisions(limit: int) -> list[JobDecision]:
    """The decisions of the latest `limit` kept jobs, in the order of submission."""
    from scheduler import Decision

    return [
        JobDecision(job.job_id, job.name, job.submitted_at, Decision.from_message(found))
        for job in jobs()[-limit:]
        if (found := decision(job.job_id)) is not None
    ]


def logs(job_id: str) -> list[LogText]:
    """A kept job's logs, a piece for each process."""
    files = sorted(_path(job_id, "logs").glob("*.log"))
    return [LogText(file.stem, file.read_text(errors="replace")) for file in files]


def _ids() -> list[str]:
    """Ids from the oldest record to the newest."""
    return [
        path.parent.name
        for path in sorted(_folder().glob("*/status.pb"), key=lambda path: path.stat().st_mtime)
    ]


def _folder() -> Path:
    return home() / "jobs"


def _path(job_id: str, name: str) -> Path:
    return _folder() / job_id / name


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
