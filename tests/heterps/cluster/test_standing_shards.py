"""Jobs on shards that somebody else starts: what they keep, a job counts on."""

import os
import signal

from chassis.process import module_argv, spawn
from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.jobs import write_ratings
from tests.waiting import wait_until


def test_a_job_goes_on_when_a_standing_shard_comes_back(tmp_path):
    labels = ((number % 50, number % 9, number % 2) for number in range(4000))
    job = load_job(write_ratings(tmp_path, labels, 150, pause_s=0.05), [f"output={tmp_path}/out"])
    with (
        Cluster(tmp_path / "cluster", types={"cpu": 2}) as cluster,
        Client(cluster.address) as client,
    ):

        def shard(bind):
            argv = module_argv("ps.server", "--bind", bind, "--scheduler", cluster.address)
            argv += ["--data", str(tmp_path / "rows")]
            return spawn("standing", argv, directory=tmp_path / "logs").wait_ready(60)

        def wait_for(condition, what):
            wait_until(condition, lambda: f"{what}: {client.status(job_id)}")

        first = shard("127.0.0.1:0")
        try:
            job_id = client.submit(job)
            wait_for(lambda: client.status(job_id).step > 10, "training")
            os.kill(first.pid, signal.SIGKILL)
            first.process.wait()
            wait_for(lambda: all(node.kind != "shard" for node in client.nodes()), "its lease")
            stopped_at = client.status(job_id)
            assert stopped_at.state == "running", stopped_at.reason
            assert stopped_at.step < 150
        finally:
            first.stop(0)
        second = shard(first.address)
        try:
            ended = client.wait(job_id, timeout=200)
            assert ended.state == "succeeded", ended.reason
            assert ended.step == 150
        finally:
            second.stop()
