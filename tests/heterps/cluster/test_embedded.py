"""The embedded cluster: real processes that come up, answer, and never outlive their owner."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest

from chassis.process import announce
from heterps import Cluster
from heterps.client.client import Client
from heterps.cluster import supervisor
from heterps.errors import ClusterError, UnknownJobError
from heterps.home import local
from tests.waiting import wait_until
from workers.node.restart import RestartRule

ROOT = Path(__file__).resolve().parents[3]


def marked(marker: str) -> list[int]:
    """Live processes with the marker in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if state != "Z" and f"HETERPS_TEST={marker}".encode() in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def wait_gone(marker: str, within_s: float = 20.0) -> None:
    wait_until(lambda: not marked(marker), lambda: marked(marker), within_s)


@pytest.fixture
def marker(monkeypatch, request):
    name = f"{os.getpid()}-{request.node.name}"
    monkeypatch.setenv("HETERPS_TEST", name)
    return name


def test_a_cluster_has_its_nodes_and_ends_whole(tmp_path, marker):
    with Cluster(tmp_path, types={"cpu": 2}, emulate=["t4"]) as cluster:
        nodes = {node.type: node for node in cluster.client().nodes()}
        assert (nodes["cpu"].units, nodes["cpu"].emulated) == (2, False)
        assert (nodes["t4"].units, nodes["t4"].emulated) == (1, True)
        assert cluster.client().jobs() == []
        assert [role.label for role in cluster.roles] == [
            "redis",
            "scheduler",
            "node cpu",
            "node t4",
        ]
        with pytest.raises(UnknownJobError, match="heterps jobs"):
            cluster.client().status("nobody")
        assert len(marked(marker)) >= 4
        cluster.check()
        cluster.children[1].process.kill()
        cluster.children[1].process.wait()
        with pytest.raises(ClusterError, match="SIGKILL"):
            cluster.check()
    wait_gone(marker, 1.0)


def test_what_a_cluster_before_has_left_leads_no_node_astray(tmp_path, marker):
    with socket.socket() as another:
        another.bind(("127.0.0.1", 0))
        another.listen()
        address = f"127.0.0.1:{another.getsockname()[1]}"
        (tmp_path / "logs").mkdir()
        announce(tmp_path / "logs" / "scheduler.ready.json", address=address)
        with Cluster(tmp_path, types={"cpu": 1}) as cluster:
            assert cluster.address != address
            assert [node.type for node in cluster.client().nodes()] == ["cpu"]
        another.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has come
            another.accept()
    wait_gone(marker, 1.0)


@pytest.mark.parametrize("until", ["redis", "scheduler", "nodes"])
def test_a_cluster_that_is_stopped_while_another_thread_starts_it_leaves_nothing(
    tmp_path, marker, until
):
    cluster, come = Cluster(tmp_path, types={"cpu": 1}), threading.Event()

    def on_step(step):
        if step == until:
            come.set()

    with ThreadPoolExecutor(1) as beside:
        starting = beside.submit(cluster.start, on_step)
        assert come.wait(60)
        cluster.stop()
        with pytest.raises(ClusterError, match=r"stopped|not ready|not start"):
            starting.result()
    assert cluster.children == [] or all(child.poll() is not None for child in cluster.children)
    wait_gone(marker, 1.0)
    with pytest.raises(ClusterError, match="stopped"):
        cluster.start()
    wait_gone(marker, 1.0)


def test_nodes_have_ready_what_the_first_worker_is_forked_from(tmp_path, marker):
    with Cluster(tmp_path, types={"cpu": 1}, emulate=["t4"]):
        imported = tmp_path / "node-cpu" / "fork-server.log"
        wait_until(lambda: "has imported workers.forked" in imported.read_text(), "it is there")
        assert not (tmp_path / "node-t4" / "fork-server.log").exists()
    wait_gone(marker, 1.0)


def test_nothing_outlives_an_owner_that_is_killed(tmp_path, marker):
    script = (
        "import time; from heterps import Cluster\n"
        f"with Cluster({str(tmp_path)!r}, types={{'cpu': 1}}): print('up', flush=True);"
        " time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    owner.kill()
    owner.wait()
    wait_gone(marker)


def test_a_port_in_use_is_named(tmp_path, marker):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"cannot listen on {bind}"):
            Cluster(tmp_path, types={"cpu": 1}, bind=bind).start()
    wait_gone(marker, 1.0)


def test_a_redis_that_is_not_there_is_named(tmp_path, marker):
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:1"):
        Cluster(tmp_path, types={"cpu": 1}, redis_url="redis://:secret@127.0.0.1:1/0").start()
    wait_gone(marker, 1.0)


def test_up_stays_until_down(marker, capsys):
    from heterps import cli

    try:
        assert cli.main(["up", "--units", "1"]) == 0
        running = local.running()
        assert running is not None
        said = capsys.readouterr().out
        assert running.address in said
        if find_spec("fastapi"):  # else the console's extra is not installed
            (url,) = [role.address for role in running.roles if role.label == "console"]
            assert f"console at {url}" in said
            with urlopen(url, timeout=60) as page:
                assert b"No jobs yet" in page.read()
        assert cli.main(["status"]) == 0
        shown = capsys.readouterr().out
        for role in running.roles:
            assert role.label in shown
            assert str(role.pid) in shown
        assert cli.main(["up"]) == 4
        assert "heterps down" in capsys.readouterr().err
        with Client() as client:
            assert client.address == running.address
    finally:
        assert cli.main(["down"]) == 0
    assert local.running() is None
    wait_gone(marker, 2.0)


def test_a_supervisor_that_is_killed_leaves_nothing(marker):
    running = supervisor.up({"cpu": 1}, [])
    os.kill(running.pid, signal.SIGKILL)
    wait_gone(marker)
    assert local.running() is None, "its record is not believed"
    assert supervisor.down() is None


def test_what_dies_is_started_again_at_its_place(marker):
    running = supervisor.up({"cpu": 1}, [])
    try:
        before = {role.label: role for role in running.roles}
        victims = [label for label in ("scheduler", "node cpu", "console") if label in before]
        for label in victims:
            os.kill(before[label].pid, signal.SIGKILL)

        def revived():
            now = {role.label: role for role in local.running().roles}
            return now if all(now[label].pid != before[label].pid for label in victims) else None

        now = wait_until(revived, "all are started again")
        assert now["scheduler"].address == running.address
        with Client(running.address) as client:
            wait_until(lambda: [node.type for node in client.nodes()] == ["cpu"], "the node joins")
        if "console" in victims:
            assert now["console"].address == before["console"].address
            with urlopen(now["console"].address, timeout=20) as page:
                assert b"No jobs yet" in page.read()
    finally:
        supervisor.down()
    wait_gone(marker)


def test_what_dies_again_and_again_stays_down(tmp_path):
    """A restart is granted, the next death within the window is final."""
    stop = threading.Event()
    with Cluster(tmp_path, types={"cpu": 1}) as cluster:
        reviver = supervisor.Reviver([cluster], stop, RestartRule(most=1))
        assert not reviver.step()
        for expected in (True, False):
            node = cluster.children[1]
            os.kill(node.pid, signal.SIGKILL)
            node.process.wait()
            assert reviver.step() is expected
        assert not reviver.step()
        assert cluster.children[0].poll() is None
