"""Shards that die, restart or never were."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from chassis.channels import connect
from chassis.exits import DAMAGED
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import LocalShards, ParameterClient, ShardError
from tests.pids import alive, stop
from tests.waiting import wait_until


def test_a_killed_shard_is_named_in_bounded_time_and_comes_back(tmp_path: Path) -> None:
    keys = np.arange(1000)
    with (
        LocalShards(2, directory=tmp_path / "ck") as shards,
        ParameterClient(shards.addresses, timeout_s=2) as client,
    ):
        client.create_table("t", 4, optimizer="adagrad", learning_rate=0.1)
        client.push("t", keys, np.ones((1000, 4), np.float32))
        client.save(tmp_path / "ck")
        rows = client.pull("t", keys)
        address = shards.addresses[1]
        os.kill(shards.processes[1].pid, signal.SIGKILL)
        for call in (
            lambda: client.pull("t", keys),
            lambda: client.push("t", keys, np.ones((1000, 4), np.float32)),
        ):
            began = time.monotonic()
            with pytest.raises(ShardError, match=rf"shard 1 \({address}\) did not answer") as e:
                call()
            assert time.monotonic() - began < 6
            assert e.value.shard == 1
        shards.restart(1)
        assert shards.addresses[1] == address
        shards.restart(0)
        np.testing.assert_array_equal(client.pull("t", keys), rows)


def test_calls_outlast_a_restart(tmp_path: Path) -> None:
    with (
        LocalShards(1, directory=tmp_path / "ck") as shards,
        ParameterClient(shards.addresses, timeout_s=20) as client,
    ):
        client.create_table("t", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros")
        client.push("t", [1], np.float32([[-1]]))
        client.save(tmp_path / "ck")
        os.kill(shards.processes[0].pid, signal.SIGKILL)
        future = client.push_async("t", [1], np.float32([[-1]]))
        shards.restart(0)
        future.result(20)
        assert client.pull("t", [1])[0, 0] == 2


def test_applied_pushes_are_remembered_across_a_restart(tmp_path: Path) -> None:
    with (
        LocalShards(1, directory=tmp_path / "ck") as shards,
        ParameterClient(shards.addresses) as client,
    ):
        client.create_table("t", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros")
        head = pb.PushRequest(table="t", dim=1, count=1, client="me", epoch=7, sequence=3)
        request = pack(head, np.uint64([5]), np.float32([-1]))

        def push() -> bool:
            with connect(shards.addresses[0]) as channel:
                call = channel.unary_unary("/heterps.v1.ParameterServer/Push")
                return pb.PushReply.FromString(call(request, timeout=10)).applied

        assert push()
        client.save(tmp_path / "ck")
        shards.restart(0)
        assert not push()
        assert client.pull("t", [5])[0, 0] == 1


def test_each_table_comes_back_from_what_keeps_it(tmp_path: Path) -> None:
    """Logs and replicas have the last push; a checkpoint has what it had when it was saved."""
    keys = np.arange(100)
    durabilities = ("none", "checkpoint", "log", "replica")
    with (
        LocalShards(
            1, directory=tmp_path / "ck", replicas=True, options=("--fold", "1e9")
        ) as shards,
        ParameterClient(shards.addresses) as client,
    ):
        for name in durabilities:
            client.create_table(
                name,
                1,
                optimizer="sgd",
                learning_rate=1.0,
                initializer="zeros",
                durability=name,
            )
            client.push(name, keys, np.full((100, 1), -1, np.float32))
        client.save(tmp_path / "ck")
        for name in durabilities:
            client.push(name, keys, np.full((100, 1), -1, np.float32))
        shards.processes[0].process.kill()
        shards.restart(0)
        found = {name: client.pull(name, keys) for name in durabilities}
        # No base was folded yet, and the shard's own data comes before any checkpoint.
        expected = {"none": 1, "checkpoint": 0, "log": 2, "replica": 2}
        assert {n: set(rows[:, 0].tolist()) for n, rows in found.items()} == {
            n: {value} for n, value in expected.items()
        }
        client.drop_tables("log")
        shards.processes[0].process.kill()
        shards.restart(0)
        names = {t.name for t in client.stats()[0].tables}
        assert names == {"none", "checkpoint", "replica"}  # the checkpoint brings no table back


def test_a_silent_shard_meets_the_deadline() -> None:
    with LocalShards(1) as shards, ParameterClient(shards.addresses, timeout_s=1) as client:
        client.create_table("t", 4)
        stop(shards.processes[0].pid)
        try:
            began = time.monotonic()
            with pytest.raises(ShardError, match=r"shard 0 .* did not answer within 1 s"):
                client.pull("t", [1])
            assert time.monotonic() - began < 4
        finally:
            os.kill(shards.processes[0].pid, signal.SIGCONT)


def test_shards_end_with_their_parent_however_it_dies(tmp_path: Path) -> None:
    script = (
        "import ps, sys, time\n"
        "shards = ps.LocalShards(2)\n"
        "print(*(p.pid for p in shards.processes), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(alive(pid) for pid in pids), "they end", 10.0)


def test_close_ends_the_processes() -> None:
    with LocalShards(2) as shards:
        pids = [p.pid for p in shards.processes]
    wait_until(lambda: not any(alive(pid) for pid in pids), "they end", 10.0)


def test_server_refuses_a_bad_start(tmp_path: Path) -> None:
    for arguments, message in (
        (["--restore", str(tmp_path)], "manifest.json: not found"),
        (["--bind", "0.0.0.0:0"], "refusing to listen on 0.0.0.0"),
        (["--shard", "3", "--shards", "2"], "--shard 3: expected 0 to 1"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ps.server", *arguments],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_a_supervised_shard_that_refuses_to_start_stays_down(tmp_path: Path) -> None:
    with LocalShards(1, data=tmp_path, supervised=True) as shards:
        with ParameterClient(shards.addresses, timeout_s=20) as client:
            client.create_table("t", 1, durability="log")
            for _ in range(5):
                client.push("t", np.arange(50), np.ones((50, 1), np.float32))
        first = shards.processes[0]
        os.kill(first.pid, signal.SIGSTOP)
        (log,) = (tmp_path / "shard-0").glob("log-*")
        damaged = bytearray(log.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        log.write_bytes(damaged)
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: shards.processes[0].poll() == DAMAGED)
        refused = shards.processes[0].pid
        wait_until(lambda: "--accept-loss" in shards.processes[0].log.read_text())
        assert shards.processes[0].pid == refused
