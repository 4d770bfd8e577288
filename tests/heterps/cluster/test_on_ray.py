"""Nodes on Ray: a simulated cluster of real raylets, one of which goes in mid-job."""

import contextlib
import os
import subprocess
import sys

import pytest

from heterps import Client
from heterps.cluster.on_ray import Daemon, daemons
from heterps.errors import ClusterError
from heterps.home import local
from tests.jobs import CLICKS_LAYERS, CPU, write_clicks, write_workload
from tests.waiting import wait_until

JOB = """\
name: clicks
model: {entry: model.py:build, args: {pause_s: 0.05}}
data: {train: train.csv, label: y, dense: [x], sparse: [a, b]}
train: {epochs: EPOCHS, batch_size: 256, loss: bce_with_logits}
servers: {shards: 1}
schedule: {resources: resources.yaml, workload: workload.yaml, method: exact}
output: output
"""


def ray_node(alive=True, **resources):
    named = {f"heterps:{name}": float(units) for name, units in resources.items()}
    return {"Alive": alive, "Resources": {"CPU": 4.0, **named}}


def test_every_ray_node_gets_a_daemon_for_each_type_that_it_declares():
    nodes = [ray_node(), ray_node(cpu=4), ray_node(cpu=2, t4=1), ray_node(False, cpu=9)]
    assert daemons(nodes, {}, []) == [
        Daemon("cpu", 4, False),
        Daemon("cpu", 2, False),
        Daemon("t4", 1, False),
    ]
    assert daemons(nodes, {"cpu": 5}, []) == [Daemon("cpu", 4, False), Daemon("cpu", 1, False)]
    assert Daemon("t4", 1, False).takes == {"heterps:t4": 1, "GPU": 1}
    assert Daemon("t4", 1, True).takes == {"heterps:t4": 1, "CPU": 1}


def test_units_that_nobody_declares_are_an_error_that_says_how_to():
    with pytest.raises(ClusterError, match=r"2 Ray nodes declares.*`ray start --resources="):
        daemons([ray_node(), ray_node()], {}, [])
    with pytest.raises(ClusterError, match="--type cpu=5: Ray nodes declare 4 units"):
        daemons([ray_node(cpu=4)], {"cpu": 5}, [])


def test_without_ray_the_command_says_what_to_install(tmp_path, run, monkeypatch):
    (tmp_path / "ray.py").write_text("raise ImportError('hidden')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, _, error = run("up", "--on", "ray")
    assert (code, "pip install 'heterps[ray]'" in error) == (4, True)


def test_an_address_needs_an_engine(run):
    code, _, error = run("up", "--address", "127.0.0.1:6379")
    assert (code, "--on ray" in error) == (2, True)


@pytest.fixture
def simulated(monkeypatch):
    """A head without units and three Ray nodes with one each, all on this machine."""
    reason = "ray is not installed; pip install 'heterps[ray]'"
    pytest.importorskip("ray", reason=reason)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    from ray._private import services
    from ray.cluster_utils import Cluster

    get_node = services.get_node

    def registered(*of):
        with contextlib.suppress(RuntimeError):  # not yet
            return get_node(*of)
        return None

    def patient(*of):
        """Ray itself asks for 30 s, which is short on a busy machine."""
        return wait_until(lambda: registered(*of), "Ray knows its node", 240.0)

    monkeypatch.setattr(services, "get_node", patient)
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, resources={"heterps:cpu": 1}, **small)
        yield cluster
    finally:
        cluster.shutdown()


def parents(pid):
    """The process and all that it descends from."""
    while pid > 1:
        yield pid
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])


def written(tmp_path, epochs):
    write_clicks(tmp_path)
    (tmp_path / "resources.yaml").write_text(CPU)
    write_workload(tmp_path / "workload.yaml", CLICKS_LAYERS, {"cpu": 1e-3})
    path = tmp_path / f"job-{epochs}.yaml"
    path.write_text(JOB.replace("EPOCHS", str(epochs)))
    return path


def test_a_ray_node_that_goes_in_mid_job_is_noticed_and_replaced(simulated, tmp_path, run):
    code, out, error = run("up", "--on", "ray", "--address", simulated.address, "--type", "cpu=2")
    assert code == 0, error
    try:
        assert "2 cpu" in out
        running = local.running()
        assert running is not None
        assert [role.label for role in running.roles] == ["redis", "scheduler", "console"]
        with Client() as client:
            before = {node.node_id: node for node in client.nodes()}
            assert [node.units for node in before.values()] == [1, 1]
            job = client.submit(written(tmp_path, 100_000), overrides=["retries=1"])
            wait_until(lambda: client.status(job).step > 0, "it trains", 240.0)
            killed = remove_the_home_of_a_worker(simulated)

            def replaced():
                now = {node.node_id: node for node in client.nodes()}
                return now if len(now) == 2 and now.keys() != before.keys() else None

            after = wait_until(replaced, "nodes come back", 240.0)
            assert sum(node.units for node in after.values()) == 2

            def trains_again():
                status = client.status(job)
                assert status.state not in ("succeeded", "failed"), status.reason
                return status if status.attempt == 2 and status.step > 0 else None

            status = wait_until(trains_again, "it trains again", 240.0)
            assert [one.end_reason for one in status.attempts] == ["lost_node"]
            assert client.cancel(job).state == "cancelled"
            again = client.submit(written(tmp_path, 1))
            status = wait_until(lambda: ended(client.status(again)), "it ends", 240.0)
            assert status.state == "succeeded", status.reason
            assert not os.path.exists(f"/proc/{killed}")
    finally:
        assert run("down")[0] == 0


def ended(status):
    return status if status.state in ("succeeded", "failed", "cancelled") else None


def remove_the_home_of_a_worker(simulated):
    """Kill the Ray node under which the job's stage runs, and all its processes."""
    listed = subprocess.run(
        ["pgrep", "-f", "workers.stage --launch"], capture_output=True, text=True, check=True
    )
    ancestors = {pid: set(parents(int(pid))) for pid in listed.stdout.split()}
    for node in simulated.worker_nodes:
        raylet = node.all_processes["raylet"][0].process.pid
        for pid, line in ancestors.items():
            if raylet in line:
                simulated.remove_node(node, allow_graceful=False)
                return pid
    raise AssertionError(f"no stage runs under a Ray node: {ancestors}, {sys.argv}")
