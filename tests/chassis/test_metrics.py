"""The metrics endpoint: what it shows, to whom, and what each role exports."""

import argparse
import json
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chassis import metrics_endpoint
from chassis.metrics import Family, Metrics, Sample, add_metrics_option, serve_metrics
from chassis.security import SecurityError
from chassis.servers import BindError
from heterps.home import certs
from protos import parameter_server_pb2 as pb
from ps import LocalShards, ParameterClient
from ps.server.metrics import ShardMetrics
from tests.cluster import Roles
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
ANSWERED = Family("test_answered_total", "counter", "Questions answered.", ("who",))


def scrape(url: str, token: str = "", context: ssl.SSLContext | None = None) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=10, context=context) as reply:
        return reply.read().decode()


def values(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and, in the order of the labels' names, label values."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def served():
    metrics = Metrics()
    asked = []
    metrics.collect((ANSWERED,), lambda: asked.append(1) or [(ANSWERED, ("a",), 40 + len(asked))])
    metrics.histogram("test_seconds", "Took.", ("method",)).labels("Pull").observe(0.002)
    address, close = serve_metrics("127.0.0.1:0", metrics)
    yield address, asked
    close()
    close()


def test_collected_values_are_read_at_each_scrape_and_not_before(served):
    address, asked = served
    assert asked == []
    assert values(scrape(f"http://{address}/metrics"))["test_answered_total", "a"] == 41
    found = values(scrape(f"http://{address}/metrics"))
    assert found["test_answered_total", "a"] == 42
    assert found["test_seconds_bucket", "0.001", "Pull"] == 0
    assert found["test_seconds_bucket", "0.0025", "Pull"] == 1
    assert found["process_resident_memory_bytes",] > 1e6
    assert not any(name.endswith("_created") for name, *_ in found)


def test_prometheus_gets_the_format_that_it_asks_for(served):
    request = urllib.request.Request(
        f"http://{served[0]}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
        assert reply.read().decode().endswith("# EOF\n")


def takes(connection: socket.socket) -> bool:
    """Whether it takes a byte."""
    try:
        connection.sendall(b"G")
    except OSError:
        return False
    return True


def test_no_address_takes_all_connections_and_none_stays(served, monkeypatch):
    address, _ = served
    host, _, port = address.rpartition(":")
    monkeypatch.setattr(metrics_endpoint, "_MOST", 4)
    monkeypatch.setattr(metrics_endpoint, "_SHARE", 3)
    slow = [
        socket.create_connection((host, int(port)), timeout=30, source_address=("127.0.0.2", 0))
        for _ in range(5)
    ]
    try:
        assert [each.recv(1) for each in slow[3:]] == [b"", b""]
        assert "test_seconds" in scrape(f"http://{address}/metrics")
        monkeypatch.setattr(metrics_endpoint, "_TIMEOUT_S", 0.2)
        for each in slow:
            each.close()
        late = socket.create_connection((host, int(port)), timeout=5)
        slow.append(late)
        wait_until(lambda: not takes(late), "a byte now and then keeps no connection")
    finally:
        for each in slow:
            each.close()


def test_other_paths_are_not_served(served):
    with pytest.raises(urllib.error.HTTPError) as caught:
        scrape(f"http://{served[0]}/")
    assert caught.value.code == 404


def test_what_cannot_be_read_fails_the_scrape():
    metrics, nothing = Metrics(), dict[str, list[Sample]]()
    metrics.collect((ANSWERED,), lambda: nothing["figures"])
    address, close = serve_metrics("127.0.0.1:0", metrics)
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            scrape(f"http://{address}/metrics")
        assert caught.value.code == 500
    finally:
        close()


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "example.org:80"])
def test_a_bind_that_others_reach_demands_tls_and_a_token(bind):
    with pytest.raises(SecurityError, match="refusing to listen"):
        serve_metrics(bind, Metrics())


def test_a_port_in_use_is_named(served):
    with pytest.raises(BindError, match=f"--metrics {served[0]}: cannot listen"):
        serve_metrics(served[0], Metrics())


def test_others_need_tls_and_the_token(tmp_path, monkeypatch):
    for name, value in certs.make(tmp_path).items():
        monkeypatch.setenv(name, value)
    token = (tmp_path / certs.TOKEN).read_text().strip()
    context = ssl.create_default_context(cafile=str(tmp_path / certs.CA))
    address, close = serve_metrics("0.0.0.0:0", Metrics())
    url = f"https://127.0.0.1:{address.rpartition(':')[2]}/metrics"
    try:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))):
            # One that never shakes hands holds nobody up.
            assert "process_" in scrape(url, token, context)
        for wrong in ("", "x" * 20, token[:-1], "\xff" * 20):
            with pytest.raises(urllib.error.HTTPError) as caught:
                scrape(url, wrong, context)
            assert caught.value.code == 401
        with pytest.raises(urllib.error.URLError):
            scrape(url, token, ssl.create_default_context())  # another authority
        with pytest.raises(ConnectionError):
            scrape(url.replace("https", "http"), token)
    finally:
        close()


def test_a_token_of_its_own_opens_the_metrics_alone(tmp_path, monkeypatch):
    for name, value in certs.make(tmp_path).items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "metrics-token"
    own.write_text("only-for-looking-at-it\n")
    monkeypatch.setenv("HETERPS_METRICS_TOKEN_FILE", str(own))
    context = ssl.create_default_context(cafile=str(tmp_path / certs.CA))
    address, close = serve_metrics("127.0.0.1:0", Metrics())
    try:
        assert "process_" in scrape(f"https://{address}/metrics", own.read_text().strip(), context)
        with pytest.raises(urllib.error.HTTPError):
            scrape(f"https://{address}/metrics", (tmp_path / "token").read_text().strip(), context)
    finally:
        close()
    own.write_text("short")
    with pytest.raises(SecurityError, match="shorter than 16"):
        serve_metrics("127.0.0.1:0", Metrics())


@pytest.mark.parametrize("text", ["9400", ":9400", "127.0.0.1:", "127.0.0.1:x", "h:65536"])
def test_the_option_wants_host_and_port(text, capsys):
    parser = argparse.ArgumentParser()
    add_metrics_option(parser)
    assert parser.parse_args([]).metrics == ""
    assert parser.parse_args(["--metrics", "127.0.0.1:0"]).metrics == "127.0.0.1:0"
    with pytest.raises(SystemExit):
        parser.parse_args(["--metrics", text])
    assert "expected HOST:PORT" in capsys.readouterr().err


def test_roles_without_metrics_do_not_load_the_library():
    script = (
        "import sys, chassis.metrics, ps.server.metrics, scheduler.service, workers.node;"
        "print('prometheus_client' in sys.modules, 'chassis.spans' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == ["False", "False"]


def test_a_shards_stats_are_what_it_shows():
    with LocalShards(1) as shards, ParameterClient(shards.addresses) as client:
        client.create_table("user", 4)
        client.pull("user", np.arange(50))
        client.push("user", np.arange(20), np.ones((20, 4), np.float32))
        shown = ShardMetrics(lambda: client.stats()[0], threads=16)
        address, close = serve_metrics("127.0.0.1:0", shown.metrics)
        try:
            stats = client.stats()[0].tables[0]
            found = values(scrape(f"http://{address}/metrics"))
        finally:
            close()
    assert found["heterps_ps_table_rows", "user"] == stats.rows == 20
    assert found["heterps_ps_table_memory_bytes", "user"] == stats.bytes > 0
    assert found["heterps_ps_pulled_keys_total", "user"] == 50
    assert found["heterps_ps_pushed_keys_total", "user"] == 20
    assert found["heterps_ps_resident_bytes",] > 1e6
    assert found["heterps_ps_call_threads",] == 16


def test_every_figure_of_a_shard_is_shown():
    """Each gets a value of its own, so that none is shown in place of another."""
    table, stats = pb.TableStats(name="t"), pb.StatsReply()
    given = set()
    for message, skipped in ((table, {"name", "dim", "spec"}), (stats, {"tables", "run"})):
        for field in message.DESCRIPTOR.fields:
            if field.name not in skipped:
                value = 1000.0 + len(given)
                given.add(value)
                setattr(message, field.name, type(getattr(message, field.name))(value))
    stats.tables.append(table)
    shown = ShardMetrics(lambda: stats)
    address, close = serve_metrics("127.0.0.1:0", shown.metrics)
    try:
        found = values(scrape(f"http://{address}/metrics"))
    finally:
        close()
    assert given == {v for (name, *_), v in found.items() if 1000 <= v < 1000 + len(given)}


def test_calls_pushes_and_lags_are_counted():
    shown = ShardMetrics(pb.StatsReply)
    read = shown.metrics.registry.get_sample_value
    with shown.call("Pull"):
        assert read("heterps_ps_calls_in_flight") == 1
    with pytest.raises(KeyError), shown.call("Pull"):
        raise KeyError
    shown.observe("Push", 0.0002, failed=False)
    for applied in (True, True, False):
        shown.pushed(applied)
    for steps in (0, 3):
        shown.lag(steps)
    assert read("heterps_ps_calls_in_flight") == 0
    assert read("heterps_ps_call_seconds_count", {"method": "Pull"}) == 2
    assert read("heterps_ps_calls_failed_total", {"method": "Pull"}) == 1
    assert read("heterps_ps_calls_failed_total", {"method": "Push"}) == 0
    assert read("heterps_ps_call_seconds_bucket", {"method": "Push", "le": "0.0001"}) == 0
    assert read("heterps_ps_call_seconds_bucket", {"method": "Push", "le": "0.00025"}) == 1
    assert read("heterps_ps_pushes_total", {"outcome": "applied"}) == 2
    assert read("heterps_ps_pushes_total", {"outcome": "repeated"}) == 1
    assert read("heterps_ps_staleness_steps_bucket", {"le": "0.0"}) == 1
    assert read("heterps_ps_staleness_steps_sum") == 3


def test_the_scheduler_and_a_node_show_what_they_have(tmp_path):
    metrics = ("--metrics", "127.0.0.1:0")
    with Roles(tmp_path) as roles:
        scheduler = roles.scheduler(*metrics)
        node = roles.node(scheduler, "cpu", "--units", "3", *metrics)
        found = values(scrape(f"http://{scheduler.facts['metrics']}/metrics"))
        found |= values(scrape(f"http://{node.facts['metrics']}/metrics"))
    assert found["heterps_scheduler_nodes", "node"] == 1
    assert found["heterps_scheduler_nodes", "shard"] == 0
    assert found["heterps_scheduler_units", "cpu"] == 3
    assert found["heterps_scheduler_units_used", "cpu"] == 0
    assert found["heterps_scheduler_queue_length",] == 0
    assert found["heterps_scheduler_jobs", "running"] == 0
    assert found["heterps_node_units", "cpu"] == 3
    assert found["heterps_node_processes", "stage"] == 0
    assert scheduler.poll() == 0, "it ends in order"
    assert json.loads(scheduler.ready_file.read_text())["redis"]
