"""The deployment, truly run: images built, containers started, a job submitted from outside.

Runs where HETERPS_CONTAINERS=1 says so (`make test-containers`) and says why it does not elsewhere.
HETERPS_CONTAINERS_CACHE names a folder where the engine's images stay for the next run;
HETERPS_CONTAINERS_IMAGE one of them, to be run as it is in place of a new build.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.deploy import engine as engines
from tests.deploy.composed import Composed, wait_for
from tests.deploy.engine import DEPLOY, Engine

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(engines.why_not()), reason=engines.why_not()),
]

REQUIRED_AUC = 0.82  # as tests/heterps/commands/test_train.py
GIVEN_IMAGE = os.environ.get("HETERPS_CONTAINERS_IMAGE")
IMAGE = GIVEN_IMAGE or "heterps:test"
USER = "10001"
JOB = "from-outside"
ROLES = ("heterps-scheduler-1", "heterps-ps-1", "heterps-ps-2", "heterps-node-cpu-1")


@pytest.fixture(scope="module")
def running():
    """The engine, with the image built and everything else in place."""
    cache = os.environ.get("HETERPS_CONTAINERS_CACHE")
    folder = Path(cache or tempfile.mkdtemp(prefix="heterps-containers-"))
    folder.mkdir(parents=True, exist_ok=True)
    engine = Engine(folder)
    try:
        if not GIVEN_IMAGE:
            with engine.building():
                engines.stand_ins(engine)
                engines.build_image(engine, IMAGE)
        with engine.running():
            yield engine
    finally:
        if not cache:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(running, tmp_path_factory):
    """`./secrets.sh`, `docker compose up`, and a client that knows where to find it."""
    composed = Composed(running, tmp_path_factory.mktemp("composed"), IMAGE)
    composed.compose("down", "--volumes", "--remove-orphans", "--timeout=10", check=False)
    composed.make_secrets()
    composed.up()
    ca, token = (str(composed.secrets / name) for name in ("ca.pem", "token"))
    composed.heterps(
        *("context", "set", "box", "--scheduler", "127.0.0.1:7000"),
        *("--ca", ca, "--token-file", token),
    )
    composed.heterps("context", "use", "box")
    try:
        yield composed
    finally:
        composed.compose("--profile=monitoring", "down", "--volumes", "--timeout=10", check=False)


def submit_arguments(cluster, job_id, *overrides):
    return (
        *("submit", str(cluster.shared / "flights/job.yaml"), "--id", job_id),
        *(
            part
            for override in (
                f"data.path={cluster.shared}/data",
                f"output={cluster.runs}",
                *overrides,
            )
            for part in ("--set", override)
        ),
    )


def test_roles_run_without_rights(cluster):
    containers = cluster.containers()
    assert set(ROLES) | {"heterps-redis-1"} == set(containers)
    for name, one in containers.items():
        host = one["HostConfig"]
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert "no-new-privileges:true" in host["SecurityOpt"], name
        assert host["Memory"] > 0, name
        assert host["NanoCpus"] > 0, name
        assert host["PidsLimit"] > 0, name
        user = cluster.engine.docker("exec", name, "id", "-u").strip()
        assert user == (USER if name in ROLES else "999"), name
        refused = cluster.engine.docker("exec", name, "touch", "/here", check=False)
        assert "Read-only file system" in refused, name


def test_no_secret_is_told_by_inspect(cluster):
    secrets = [path.read_text().strip() for path in cluster.secrets.glob("*") if path.is_file()]
    told = json.dumps(cluster.containers())
    assert len(secrets) == 7
    assert not [secret for secret in secrets if secret in told]
    assert oct(cluster.secrets.stat().st_mode)[-3:] == "700"


def test_strangers_are_refused(cluster, tmp_path):
    (tmp_path / "token").write_text("not the token of this cluster")
    ca = str(cluster.secrets / "ca.pem")
    wrong = {"HETERPS_TLS_CA": ca, "HETERPS_TOKEN_FILE": str(tmp_path / "token")}
    here = ("--scheduler", "127.0.0.1:7000")
    assert "token is missing or wrong" in cluster.heterps_fails("jobs", *here, env=wrong)
    metrics = wrong | {"HETERPS_TOKEN_FILE": str(cluster.secrets / "metrics-token")}
    assert "token is missing or wrong" in cluster.heterps_fails("jobs", *here, env=metrics)
    assert "no scheduler answers" in cluster.heterps_fails("jobs", *here)


def test_a_job_survives_its_shard_and_its_scheduler(cluster, tmp_path):
    log = tmp_path / "client.log"
    client = cluster.started(log, *submit_arguments(cluster, JOB), "--wait")
    try:
        wait_for(lambda: cluster.job(JOB).get("step", 0) > 5 or ended(client), "training")
        cluster.kill("heterps-ps-2")
        after = cluster.job(JOB)
        assert after["state"] == "running", after
        wait_for(
            lambda: cluster.job(JOB)["step"] > after["step"] + 2 or ended(client),
            "training to go on after the shard's death",
        )
        cluster.kill("heterps-scheduler-1")
        code = client.wait(600)
    finally:
        client.kill()
        client.wait()
    output = log.read_text()
    assert code == 0, f"{output}\n{cluster.job(JOB)}\n{cluster.compose('logs', '--tail=80')}"
    job = cluster.job(JOB)
    assert job["state"] == "succeeded"
    assert job["metrics"]["test_auc"] >= REQUIRED_AUC
    assert (cluster.runs / JOB / "model.json").exists()


def test_what_was_decided_can_be_inspected(cluster):
    seen = cluster.heterps("inspect", JOB)
    assert "Plan" in seen
    assert "parameter server" in seen
    decision = json.loads(cluster.heterps("inspect", JOB, "--json"))
    assert "measured" in json.dumps(decision)


def test_a_scheduler_that_died_knows_its_jobs_and_nodes_again(cluster):
    cluster.kill("heterps-scheduler-1")
    assert cluster.job(JOB)["state"] == "succeeded"
    wait_for(lambda: len(cluster.nodes()) == 3, "two shards and a node")


def test_shards_and_nodes_scale(cluster):
    cluster.up("--no-recreate", "--scale=ps=3", "--scale=node-cpu=2")
    names = [f"heterps-ps-{i}:7100" for i in (1, 2, 3)]
    names += [f"heterps-node-cpu-{i}:7200" for i in (1, 2)]
    wait_for(lambda: {n["address"] for n in cluster.nodes()} == set(names), "all of them")
    cluster.heterps(
        *submit_arguments(cluster, "on-three", "train.max_steps=20", "servers.shards=3"), "--wait"
    )
    job = cluster.job("on-three")
    assert job["state"] == "succeeded"
    cluster.up("--scale=ps=2", "--scale=node-cpu=1")
    wait_for(lambda: len(cluster.nodes()) == 3, "those that were removed to be gone")


def test_prometheus_reaches_every_role(cluster):
    # Its health is asked by a command that Debian's version has not got, so it is not waited for.
    cluster.compose(
        *("--profile", "monitoring", "up", "--detach", "--no-build", "--no-recreate", "prometheus")
    )
    check = ("exec", "heterps-prometheus-1", "promtool", "check", "config")
    cluster.engine.docker(*check, "/etc/prometheus/prometheus.yaml")

    def health():
        text = cluster.engine.run(
            ["curl", "--silent", "http://127.0.0.1:9090/api/v1/targets"], inside=True
        )
        targets = json.loads(text)["data"]["activeTargets"]
        return sorted((target["labels"]["role"], target["health"]) for target in targets)

    wanted = sorted([("node", "up"), ("ps", "up"), ("ps", "up"), ("scheduler", "up")])
    wait_for(lambda: health() == wanted, "all targets to be up")


def test_stopping_is_clean_and_the_state_stays(cluster):
    cluster.compose("stop")
    for name, one in cluster.containers().items():
        if "prometheus" not in name:
            assert one["State"]["ExitCode"] == 0, (name, cluster.compose("logs", "--tail=20"))
            assert not one["State"]["OOMKilled"], name
    cluster.up()
    assert cluster.job(JOB)["state"] == "succeeded"
    assert "Plan" in cluster.heterps("inspect", JOB)


def test_the_readme_names_every_setting():
    text = (DEPLOY / "docker-compose.yml").read_text()
    readme = (DEPLOY / "README.md").read_text()
    names = {part.partition("}")[0].split(":")[0].split("-")[0] for part in text.split("${")[1:]}
    assert not [name for name in sorted(names) if name not in readme]


def ended(process):
    return process.poll() is not None
