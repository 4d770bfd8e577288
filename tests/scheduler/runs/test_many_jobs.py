"""Many jobs at once from several clients, while the scheduler is killed again and again."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import pytest

from chassis.process import Child
from protos.scheduler_pb2 import (
    END_SCHEDULER_LOST,
    END_SUCCEEDED,
    RUNNING,
    SUCCEEDED,
    JobStatus,
)
from scheduler.state.redis_server import EmbeddedRedis
from scheduler.state.store import TERMINAL, Store
from tests.cluster import Roles
from tests.rounds import rounds
from tests.scheduler.lives import job, log_of, prepare, steps_of
from tests.waiting import wait_until

pytest.importorskip("workers.stage")
CLIENTS, NODES, STEPS = 4, 3, 40

# Submits what it is given, riding out a scheduler that is away, follows every log, and waits for
# every end. Prints the ends, and the logs that came otherwise than they are kept.
_CLIENT = """
import asyncio, json, sys, threading, time
from collections import defaultdict
from heterps import AsyncClient, Client
from heterps.errors import UnreachableError
from protos.job_pb2 import JobSpec

def patiently(action):
    until = time.monotonic() + 300
    while True:
        try:
            return action()
        except UnreachableError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)

def add(pieces, texts):
    for piece in pieces:
        texts[piece.process] += piece.text

async def add_later(name, texts):
    async with AsyncClient(sys.argv[1]) as client:
        async for piece in client.logs(name, follow=True):
            texts[piece.process] += piece.text
        assert (await client.wait(name)).state.is_final

client = Client(sys.argv[1])
names, followed, followers = [], [], []
for path in sys.argv[2:]:
    job = JobSpec.FromString(open(path, "rb").read())
    patiently(lambda: client.submit(job, job_id=job.name))
    patiently(lambda: client.submit(job, job_id=job.name))
    names.append(job.name)
    texts, later = defaultdict(str), defaultdict(str)
    followed.append((texts, later))
    followers += [
        threading.Thread(target=add, args=(client.logs(job.name, follow=True), texts), daemon=True),
        threading.Thread(target=asyncio.run, args=(add_later(job.name, later),), daemon=True),
    ]
for follower in followers:
    follower.start()
ends = {name: client.wait(name).state for name in names}
for follower in followers:
    follower.join(60)
differ = []
for name, both in zip(names, followed):
    kept = defaultdict(str)
    add(patiently(lambda: list(client.logs(name))), kept)
    if not kept:
        differ.append(f"{name}: none is kept")
    for process, text in kept.items():
        for got in both:
            if got[process] != text:
                differ.append(f"{name}: {process}: {got[process]!r} {text!r}")
print(json.dumps([ends, differ]))
"""


@rounds("kills", few=1, many=7)
def test_all_jobs_end_right_and_none_runs_twice(tmp_path: Path, kills: int) -> None:
    prepare(tmp_path, STEPS)
    names = [f"job-{number}" for number in range(3 * kills)]
    for name in names:
        spec = job(tmp_path, name)
        (tmp_path / f"{name}.spec").write_bytes(spec.SerializeToString())
    with ExitStack() as stack:
        redis_url = stack.enter_context(EmbeddedRedis(tmp_path / "redis")).url
        roles = stack.enter_context(Roles(tmp_path, redis_url))

        def start_scheduler(bind: str) -> Child:
            return roles.scheduler("--artifacts", str(tmp_path / "artifacts"), "--bind", bind)

        scheduler = start_scheduler("127.0.0.1:0")
        address = scheduler.address
        roles.shard(scheduler)
        for number in range(NODES):
            roles.node(scheduler, "cpu", "--node-id", f"node-{number}", "--units", "2")
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", _CLIENT, address]
                + [str(tmp_path / f"{name}.spec") for name in names[number::CLIENTS]],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(CLIENTS)
        ]
        stack.callback(lambda: [client.kill() for client in clients])

        seen = Store(redis_url)  # read past the scheduler, which may be dead
        stack.callback(seen.close)

        def jobs() -> list[JobStatus]:
            return seen.statuses()

        def ended() -> int:
            return sum(one.state in TERMINAL for one in jobs())

        for kill in range(kills):
            least = kill * len(names) // kills
            wait_until(
                lambda least=least: (
                    ended() >= least
                    and (any(one.state == RUNNING for one in jobs()) or ended() == len(names))
                ),
                f"{least} jobs have ended and one runs",
                600.0,
            )
            os.kill(scheduler.pid, signal.SIGKILL)
            scheduler.process.wait()
            scheduler = start_scheduler(address)
        ends: dict[str, str] = {}
        for client in clients:
            output, _ = client.communicate(timeout=600)
            assert client.returncode == 0
            ended_so, differ = json.loads(output)
            assert not differ
            ends |= ended_so
        final = {one.job_id: one for one in jobs()}

    assert ends == dict.fromkeys(names, "succeeded")
    assert sorted(final) == sorted(names)
    for name, status in final.items():
        assert (status.state, status.end_reason) == (SUCCEEDED, END_SUCCEEDED), status.reason
        assert status.step == STEPS
        # An attempt is given up only where its processes had not begun to train.
        assert {one.end_reason for one in status.attempts} <= {END_SCHEDULER_LOST}
        assert status.attempt == len(status.attempts) + 1
        computed = steps_of(log_of(tmp_path, name))
        runs = [pid for pid in dict.fromkeys(computed) if computed.count(pid) >= STEPS]
        assert len(runs) == 1, f"{name} was trained {len(runs)} times"
        turns = [pid for pid, _ in groupby(computed)]
        assert len(turns) == len(set(turns)), f"{name} ran twice at once"
