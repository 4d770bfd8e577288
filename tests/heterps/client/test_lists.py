"""Lists of jobs, a page at a time: of a client, in the shell, in the console."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from heterps import AsyncClient, Client
from heterps.commands.jobs import jobs
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import SubmitRequest
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler.service.process import SchedulerProcess
from tests.heterps.consoles import console
from tests.valkey import Valkey

IDS = [f"job-{number}" for number in range(8)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a scheduler with eight jobs that wait, and three on a page."""
    directory = tmp_path_factory.mktemp("lists")
    with pytest.MonkeyPatch.context() as patch, Valkey(directory / "redis") as redis:
        patch.setattr("scheduler.state.jobs.PAGE", 3)
        scheduler = SchedulerProcess("127.0.0.1:0", redis.url, artifacts=directory / "artifacts")
        found = scheduler.start(lambda: None)
        with Client(found) as client:
            stub = SchedulerStub(client._transport.channel)
            for job_id in IDS:
                job = JobSpec(name=job_id)
                job.schedule.offered.types.add(name="v100", price_per_hour=1.0)
                stub.Submit(SubmitRequest(job_id=job_id, job=job), timeout=20)
        yield found
        scheduler.stop()


@pytest.mark.parametrize(
    ("limit", "before", "expected"),
    [
        (0, "", IDS),
        (2, "", IDS[-2:]),
        (5, "", IDS[-5:]),
        (99, "", IDS),
        (4, "job-6", IDS[2:6]),
        (0, "job-0", []),
    ],
)
def test_a_client_gets_as_many_as_it_asks_for(
    address: str, limit: int, before: str, expected: list[str]
) -> None:
    async def later() -> list[str]:
        async with AsyncClient(address) as client:
            return [job.job_id for job in await client.jobs(limit, before)]

    with Client(address) as client:
        assert [job.job_id for job in client.jobs(limit, before)] == expected
        assert client.decisions(limit, before) == []
    assert asyncio.run(later()) == expected


def test_a_page_says_how_many_there_are_and_where_the_next_begins(address: str) -> None:
    with Client(address) as client:
        page = client.jobs_page()
        assert [job.job_id for job in page.jobs] == IDS[-3:]
        job_id, _, submitted_at = page.next.partition("@")
        assert (job_id, page.total, page.total_unended) == ("job-5", 8, 8)
        assert float(submitted_at) == page.jobs[0].submitted_at
        assert client.find("job-0") == "job-0"
        assert client.find() == "job-7"


def test_the_shell_lists_the_latest_and_says_how_to_go_on(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERPS_SCHEDULER", address)
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(jobs, arguments, catch_exceptions=False)
        return done.stdout

    assert [job["job_id"] for job in json.loads(run("--last", "4", "--json"))] == IDS[-4:]
    shown = run("--last", "2")
    assert "job-7" in shown
    assert "older ones: heterps jobs --before job-6" in shown
    older = json.loads(run("--last", "99", "--before", "job-6", "--json"))
    assert [job["job_id"] for job in older] == IDS[:6]
    assert "older ones" not in run("--before", "job-3")


@pytest.mark.exhaustive
def test_the_console_goes_from_page_to_page(address: str, tmp_path: Path) -> None:
    with console(address, tmp_path) as pages:
        first = pages.ask("/").text
        assert "8 jobs, 8 not ended" in first
        assert [name in first for name in IDS] == [False] * 5 + [True] * 3
        assert 'href="/?before=job-5@' in first
        assert "Latest" not in first
        last = pages.ask("/?before=job-2").text
        assert [name in last for name in IDS] == [True] * 2 + [False] * 6
        assert 'rel="next"' not in last
        assert "Latest" in last
