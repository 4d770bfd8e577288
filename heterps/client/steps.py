"""What takes several calls: submitting with code, waiting, following, fetching.

Each is a coroutine over a transport; `Client` runs it blocking, `AsyncClient` awaits it.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from heterps.client import calls
from heterps.client.download import Download, JobFiles
from heterps.client.origins import OriginError, origin_of, take_up, there, weights_of
from heterps.client.records import Cut, Job, JobDecision, LogText, Node, State
from heterps.client.retry import PAUSE_S, Retry
from heterps.client.transport import Transport
from heterps.errors import (
    FetchError,
    HeterpsError,
    MissingCodeError,
    NoDecisionError,
    NotMovedError,
    UnreachableError,
)
from heterps.job.checkpoints import Named, is_place
from heterps.job.data import prepare_and_check
from heterps.job.file import load_job
from heterps.job.packaging import Code
from protos.artifacts_pb2 import GetArtifactRequest
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import JobRequest, LogsRequest

_POLL_S = 0.2
_DECISIONS = 100  # jobs on a page


async def submit(
    transport: Transport,
    job: str | Path | JobSpec | None,
    job_id: str | None,
    overrides: Iterable[str] | Mapping[str, object],
    on_line: Callable[[str], None],
    code: bool,
    on_left_out: Callable[[str], None] | None = None,
    resume: str | None = None,
) -> str:
    """Prepare a job's data, send its code, queue it; its id."""
    spec = JobSpec()
    if isinstance(job, JobSpec):
        spec.CopyFrom(job)
    elif job is not None:
        path = job
        spec = await transport.work(lambda: load_job(path, overrides))
    if resume is not None:
        await _take_up(transport, spec, resume, given=job is not None)
        return await transport.call(calls.submit(job_id or calls.new_id(spec.name), spec))
    if job is None:
        raise ValueError("job: None: expected a job file or a job, or resume")
    await _look_up_weights(transport, spec)
    limit = await transport.call(calls.code_limit())  # before minutes of preparing for nobody
    await transport.work(lambda: prepare_and_check(spec, on_line))
    packed: Code | None = None
    if code:
        from heterps.job import sending

        packed = await transport.work(lambda: sending.pack(spec, limit))
        for left_out in packed.left_out:
            (on_left_out or on_line)(f"left out of the code: {left_out}")
        sending.settle(spec, packed)
        await transport.send(packed.content, f"send the code of {spec.name}")
    job_id = job_id or calls.new_id(spec.name)
    try:
        return await transport.call(calls.submit(job_id, spec))
    except MissingCodeError:
        if packed is None:
            raise
    await transport.send(packed.content, f"send the code of {spec.name}")
    return await transport.call(calls.submit(job_id, spec))


async def _take_up(transport: Transport, job: JobSpec, resume: str, *, given: bool) -> None:
    """Make a job one that goes on from `resume`, JOB[@STEP].

    Args:
        given: it was; otherwise all of it becomes as of that job.
    """
    named = Named.of(resume)
    if named is None:
        raise OriginError(f"resume: got {resume!r}, expected JOB or JOB@STEP")
    status = await transport.call(calls.status_message(await find(transport, named.job)))
    origin = origin_of(Job.of(status), named.step)
    before = status.job
    if given:
        take_up(job, before, status.job_id)
    else:
        job.CopyFrom(before)
    job.train.warm_start = ""
    job.train.resume.CopyFrom(origin)


async def _look_up_weights(transport: Transport, job: JobSpec) -> None:
    """Put the place into `train.from` that JOB[@STEP] names."""
    text = job.train.warm_start
    named = Named.of(text) if text and not is_place(text) else None
    if named is not None:
        found = await transport.call(calls.status(await find(transport, named.job)))
        job.train.warm_start = weights_of(found, named.step)


async def move(
    transport: Transport, job_id: str, plan: "str | Path | Mapping[str, object] | None"
) -> Job:
    """Have a job go over to another plan, and wait until it has, or has said why not."""
    from scheduler import Decision

    message = None
    if plan is not None:
        asked = Decision.load(plan) if isinstance(plan, str | Path) else Decision.from_json(plan)
        message = asked.to_message()
    before = (await transport.call(calls.move(job_id, message))).moves
    while True:
        found = await transport.call(calls.status(job_id))
        if len(found.moves) > len(before):
            return found
        if found.state.is_final:  # the scheduler that knew of it was replaced
            raise NotMovedError(f"job {job_id} was {found.state} before it could move")
        await transport.sleep(_POLL_S)


async def find(transport: Transport, prefix: str | None) -> str:
    """The id of the job that `prefix` begins, of the latest for None."""
    limit = 0 if prefix is not None else 1
    listed = await jobs(transport, limit, "", False, calls.CALL_S)
    return calls.match(prefix, [job.job_id for job in listed])


async def checkpoints(transport: Transport, job_id: str) -> list[Cut]:
    """The cuts of a job that are kept."""
    return there((await transport.call(calls.status(job_id))).cuts)


async def jobs(
    transport: Transport, limit: int, before: str, unended: bool, timeout_s: float
) -> list[Job]:
    """The latest `limit` jobs (0: all) before one, page by page."""
    found: list[Job] = []
    while True:
        call = calls.jobs_page(max(0, limit - len(found)), before, unended, timeout_s)
        page = await transport.call(call)
        found[:0] = page.jobs
        before = page.next
        if not before or (limit and len(found) >= limit):
            return found


async def decisions(transport: Transport, limit: int, before: str = "") -> list[JobDecision]:
    """The decisions of the latest `limit` jobs (0: of all) before one, page by page."""
    found: list[JobDecision] = []
    left = limit
    while True:
        most = min(left, _DECISIONS) if limit else _DECISIONS
        some, before = await transport.call(calls.decisions(most, before))
        found[:0] = some
        left -= most
        if not before or (limit and left <= 0):
            return found


async def nodes(transport: Transport) -> list[Node]:
    """The nodes and standing shards that are alive, page by page."""
    found: list[Node] = []
    after = ""
    while True:
        some, after = await transport.call(calls.nodes(after))
        found += some
        if not after:
            return found


async def watch(transport: Transport, job_id: str) -> AsyncIterator[Job]:
    """How a job stands, now and after each change, to its end."""
    request = JobRequest(job_id=job_id)
    async for status in _follow(transport, "WatchJob", lambda: request, "watch", job_id, Retry()):
        job = Job.of(status)
        yield job
        if job.state.is_final:
            return


async def logs(transport: Transport, job_id: str, follow: bool) -> AsyncIterator[LogText]:
    """What a job's processes wrote; with `follow`, on to its end."""
    offsets: dict[str, int] = {}

    def request() -> LogsRequest:
        return LogsRequest(job_id=job_id, follow=follow, offsets=offsets)

    retry = Retry() if follow else Retry(0.0)
    async for chunk in _follow(transport, "Logs", request, "logs", job_id, retry):
        offsets[chunk.process] = chunk.next_offset
        yield LogText(chunk.process, chunk.text)


async def wait(transport: Transport, job_id: str, timeout: float | None) -> Job:
    """Wait for a job's end, also for a scheduler that is away."""
    deadline = None if timeout is None else time.monotonic() + timeout
    retry = Retry()
    while True:
        try:
            job = await transport.call(calls.status(job_id))
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
        await transport.sleep(pause_s)


async def get(transport: Transport, job_id: str, to: str | Path | None) -> JobFiles:
    """Fetch what a job left behind."""
    job = await transport.call(calls.status(job_id))
    if not job.state.is_final:
        raise FetchError(
            f"job {job_id}: is {job.state}; expected one that has ended. "
            f"Follow it with `heterps logs -f {job_id}`."
        )
    try:
        decision = await transport.call(calls.decision(job_id))
    except NoDecisionError:
        decision = None
    download = Download(job, Path(to) if to is not None else Path(job_id))
    await transport.work(download.open)
    if job.state is State.SUCCEEDED:
        files = await transport.call(calls.files(job_id))
        for file in download.wanted(files):
            path = await transport.work(partial(download.place, file))
            if path is not None:
                request = GetArtifactRequest(digest=file.digest)
                what = f"job {job_id}: {file.name}"
                await transport.fetch(request, path, what, file.bytes)
    limit = await transport.call(calls.code_limit())
    return await transport.work(lambda: download.close(decision, limit))


async def _follow(
    transport: Transport,
    method: str,
    request: Callable[[], Message],
    what: str,
    job_id: str,
    retry: Retry,
) -> AsyncIterator[Any]:
    """What comes on a stream; where it breaks off, it is opened again.

    Args:
        request: made for each opening.
        what: it is opened for.
    """
    while True:
        try:
            async for reply in transport.stream(method, request(), what, job_id):
                retry.succeeded()
                yield reply
            return
        except HeterpsError as error:
            retry.failed(error)
        await _await_return(transport, job_id, retry)


async def _await_return(transport: Transport, job_id: str, retry: Retry) -> None:
    """Wait for a scheduler that was just away to answer again.

    A stream that is opened again does not tell: nothing may come on it for long.
    """
    while True:
        await transport.sleep(PAUSE_S)
        try:
            await transport.call(calls.status(job_id))
        except UnreachableError as error:
            retry.failed(error)
        else:
            retry.succeeded()
            return
