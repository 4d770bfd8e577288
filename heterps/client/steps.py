"""What takes several calls: submitting with code, waiting, fetching; no network in here either.

A procedure yields what is to be done, an `Call` or one of the others below, and is sent the result
or thrown the error. `Client` does it and waits, `AsyncClient` awaits it.
"""

import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from heterps.client import calls
from heterps.client.calls import Call
from heterps.client.download import Download, JobFiles
from heterps.client.records import Job, State
from heterps.client.retry import PAUSE_S, Retry
from heterps.errors import FetchError, HeterpsError, NoDecisionError, UnreachableError
from heterps.job.file import load_job
from heterps.job.prepare import prepare
from protos.artifacts_pb2 import GetArtifactRequest
from protos.job_pb2 import JobSpec

if TYPE_CHECKING:
    from chassis.transfer import Content
    from heterps.job.packaging import Code

R = TypeVar("R")
_MISSING_CODE = "code_digest"  # what the scheduler says when the code has gone meanwhile
_POLL_S = 0.2
LEFT_OUT = "left out of the code:"


@dataclass(frozen=True, slots=True)
class Work:
    """Something that takes this machine a while."""

    action: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing, for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Send:
    """Content for the scheduler to keep; whether it was not there yet."""

    content: "Content"
    what: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Content from the scheduler, into a file."""

    request: GetArtifactRequest
    path: Path
    what: str
    most_bytes: int


Step = Call[Any] | Work | Pause | Send | Fetch
Steps = Generator[Step, Any, R]


def run(steps: Steps[R], perform: Callable[[Step], Any]) -> R:
    """Do a procedure's steps one after the other; its result."""
    todo = next(steps)
    try:
        while True:
            try:
                result = perform(todo)
            except HeterpsError as error:
                todo = steps.throw(error)
            else:
                todo = steps.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        steps.close()


async def run_async(steps: Steps[R], perform: Callable[[Step], Awaitable[Any]]) -> R:
    """The same for coroutines."""
    todo = next(steps)
    try:
        while True:
            try:
                result = await perform(todo)
            except HeterpsError as error:
                todo = steps.throw(error)
            else:
                todo = steps.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        steps.close()


def submit(
    job: str | Path | JobSpec,
    job_id: str | None,
    overrides: Iterable[str] | Mapping[str, object],
    on_line: Callable[[str], None],
    code: bool,
) -> Steps[str]:
    """Prepare a job's data, send its code, queue it; its id."""
    if isinstance(job, JobSpec):
        spec = JobSpec()
        spec.CopyFrom(job)
    else:
        path = job
        spec = yield Work(lambda: load_job(path, overrides))
    limit = yield calls.code_limit()  # before minutes of preparing for nobody
    yield Work(lambda: prepare(spec, on_line))
    packed: Code | None = None
    if code:
        from heterps.job import sending

        packed = yield Work(lambda: sending.pack(spec, limit))
        for left_out in packed.left_out:
            on_line(f"{LEFT_OUT} {left_out}")
        sending.settle(spec, packed)
        yield Send(packed.content, f"send the code of {spec.name}")
    job_id = job_id or calls.new_id(spec.name)
    try:
        return (yield calls.submit(job_id, spec))  # type: ignore[no-any-return]
    except HeterpsError as error:
        if packed is None or _MISSING_CODE not in str(error):
            raise
    yield Send(packed.content, f"send the code of {spec.name}")
    return (yield calls.submit(job_id, spec))  # type: ignore[no-any-return]


def find(prefix: str | None) -> Steps[str]:
    """The id of the job that `prefix` begins, of the latest for None."""
    listed: list[Job] = yield calls.jobs(calls.CALL_S)
    return calls.match(prefix, [job.job_id for job in listed])


def wait(job_id: str, timeout: float | None) -> Steps[Job]:
    """Wait for a job's end, also for a scheduler that is away."""
    deadline = None if timeout is None else time.monotonic() + timeout
    retry = Retry()
    while True:
        try:
            job: Job = yield calls.status(job_id)
        except UnreachableError as error:
            retry.failed(error)
            last, pause_s = "out of reach", PAUSE_S
        else:
            if job.state.is_final:
                return job
            retry.succeeded()
            last, pause_s = str(job.state), _POLL_S
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"job {job_id}: still {last} after {timeout:g} s")
        yield Pause(pause_s)


def await_return(job_id: str, retry: Retry) -> Steps[None]:
    """Wait for a scheduler that was just away to answer again.

    A stream that is opened again does not tell: nothing may come on it for long.
    """
    while True:
        yield Pause(PAUSE_S)
        try:
            yield calls.status(job_id)
        except UnreachableError as error:
            retry.failed(error)
        else:
            retry.succeeded()
            return


def get(job_id: str, to: str | Path | None) -> Steps[JobFiles]:
    """Fetch what a job left behind."""
    job: Job = yield calls.status(job_id)
    if not job.state.is_final:
        raise FetchError(
            f"job {job_id}: is {job.state}; expected one that has ended. "
            f"Follow it with `heterps logs -f {job_id}`."
        )
    try:
        decision = yield calls.decision(job_id)
    except NoDecisionError:
        decision = None
    download = Download(job, Path(to) if to is not None else Path(job_id))
    yield Work(download.open)
    if job.state is State.SUCCEEDED:
        kept = yield calls.files(job_id)
        for file in download.wanted(kept):
            path = yield Work(lambda file=file: download.place(file))  # type: ignore[misc]
            if path is not None:
                request = GetArtifactRequest(digest=file.digest)
                yield Fetch(request, path, f"job {job_id}: {file.name}", file.bytes)
    limit: int = yield calls.code_limit()
    return (yield Work(lambda: download.close(decision, limit)))  # type: ignore[no-any-return]
