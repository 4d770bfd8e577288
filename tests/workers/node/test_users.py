"""Jobs of different users on one node: each runs as a user of its own, with folders of its own."""

import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from chassis.process import spawn
from chassis.security import SecurityError
from heterps import Client
from tests.jobs import CLICKS_LAYERS, write_clicks, write_workload
from tests.secured import Secured
from tests.waiting import wait_until
from workers.node.users import NoUserError, Users, give

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
FIRST, LAST = 70000, 70009
JOB = """\
name: apart
model: {entry: model.py:build, args: {pause_s: PAUSE, look_at: LOOK}}
data: {train: train.csv, valid: train.csv, label: y, dense: [x], sparse: [a, b]}
train: {epochs: EPOCHS, batch_size: 256, loss: bce_with_logits}
servers: {shards: 1}
schedule: {resources: resources.yaml, workload: workload.yaml, method: exact}
"""
LOOKS = """
import json, os, sys
from pathlib import Path


def _tells(place):
    try:
        path = Path(place)
        return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes().hex()[:8]
    except PermissionError:
        return "refused"
    except OSError as error:
        return type(error).__name__


def _look(places):
    ids = [*os.getresuid(), *os.getresgid(), *os.getgroups()]
    token = Path(os.environ["HETERPS_TOKEN_FILE"]).read_text()
    found = {place: _tells(place) for place in places}
    own = {name: os.stat(os.environ[name]).st_mode & 0o777 for name in ("HOME", "TMPDIR")}
    told = {"ids": ids, "token": token, "found": found, "own": own}
    told["scratch"] = os.environ["HETERPS_SCRATCH"]
    print("LOOKED " + json.dumps(told), file=sys.stderr, flush=True)
"""


def python_for_others():
    """A Python like ours that any user may run, and where its packages are; None where none is."""
    ours = Path(sys.base_prefix)
    paths = [path for path in sys.path if path.endswith("site-packages")]
    for candidate in (Path(sys.executable), Path(f"/usr/bin/python3.{sys.version_info.minor}")):
        home = ours if candidate == Path(sys.executable) else candidate
        if candidate.exists() and all(p.stat().st_mode & 0o001 for p in (home, *home.parents)):
            return str(candidate), paths
    return None


PYTHON = python_for_others()


def written(folder, look_at=(), pause_s=0.0, epochs=1):
    folder.mkdir(parents=True)
    write_clicks(folder)
    model = folder / "model.py"
    text = model.read_text().replace(
        "def build(pause_s=0.0):", "def build(pause_s=0.0, look_at=()):\n    _look(look_at)"
    )
    model.write_text(LOOKS + text)
    seconds = {"cpu": 1e-3}
    write_workload(folder / "workload.yaml", CLICKS_LAYERS, seconds, parallel_compute=1.0)
    values = {"PAUSE": str(pause_s), "LOOK": json.dumps(list(look_at)), "EPOCHS": str(epochs)}
    job = JOB
    for name, value in values.items():
        job = job.replace(name, value)
    (folder / "job.yaml").write_text(job)
    return folder / "job.yaml"


def looked(client, job_id):
    text = "".join(piece.text for piece in client.logs(job_id))
    lines = [line for line in text.splitlines() if "LOOKED " in line]
    return [json.loads(line.partition("LOOKED ")[2]) for line in lines]


def trains(client, job_id):
    status = client.status(job_id)
    assert status.state != "failed", status.reason
    return status.step > 0


def processes_of(user):
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if path.name.isdecimal() and path.stat().st_uid == user:
                found.append(path.name)
    return found


@pytest.mark.exhaustive
@pytest.mark.skipif(PYTHON is None, reason="no Python here that any user may run")
def test_jobs_run_as_users_of_their_own_and_reach_neither_each_other_nor_the_node():
    python, packages = PYTHON
    root = Path(__file__).resolve().parents[3]
    with tempfile.TemporaryDirectory(prefix="heterps-users-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        with Secured(folder / "cluster") as cluster, pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.files.items():
                patch.setenv(name, value)
            argv = [python, "-P", "-m", "workers.node", "--type", "cpu", "--units", "16"]
            argv += ["--scheduler", cluster.scheduler.address, "--directory", str(folder / "node")]
            argv += ["--user-per-job", f"{FIRST}-{LAST}", "--bind", "127.0.0.1:0"]
            # As an installation would be: links of packages to where they lie are followed.
            customized = "import site, sys\n"
            customized += "sys.path[:] = [p for p in sys.path if 'dist-packages' not in p]\n"
            customized += "".join(f"site.addsitedir({p!r})\n" for p in packages)
            (folder / "sitecustomize.py").write_text(customized)
            environment = {"PYTHONPATH": os.pathsep.join([str(root), str(folder)])}
            node = spawn("node", argv, directory=folder / "logs", environment=environment)
            try:
                node.wait_ready(120)
                with Client(cluster.scheduler.address) as client:
                    first = client.submit(written(folder / "one", pause_s=0.5, epochs=50))
                    wait_until(
                        lambda: trains(client, first), lambda: client.status(first), timeout_s=300
                    )
                    home = folder / "node" / first / "home"
                    others = [home, home / "token", folder / "node", folder / "node" / first]
                    own = [*cluster.files.values(), f"/proc/{node.pid}/environ"]
                    places = [str(one) for one in (*others, *own)]
                    second = client.submit(written(folder / "two", look_at=places))
                    ended = client.wait(second, timeout=300)
                    assert ended.state == "succeeded", ended.reason
                    told, *likewise = looked(client, first)
                    seen, *_ = looked(client, second)
                    assert all(one["ids"] == told["ids"] for one in likewise)
                    user, other = told["ids"][0], seen["ids"][0]
                    assert told["ids"] == [user] * 6
                    assert seen["ids"] == [other] * 6
                    assert (user, other) == (FIRST, FIRST + 1)
                    ca = cluster.files["HETERPS_TLS_CA"]
                    refused = {place for place, what in seen["found"].items() if what == "refused"}
                    assert refused >= set(places) - {ca, cluster.files["HETERPS_TLS_CERT"]}
                    assert seen["token"] != told["token"] != cluster.root
                    assert seen["own"] == {"HOME": 0o700, "TMPDIR": 0o700}
                    assert Path(told["scratch"]).stat().st_mode & 0o777 == 0o700
                    assert Path(told["scratch"]).stat().st_uid == user
                    assert len(processes_of(user)) >= 2, "a worker and a shard"
                    assert not processes_of(other)
                    client.cancel(first)
                    assert client.wait(first, timeout=60).cancelled_by == "root"
                    wait_until(lambda: not processes_of(user), "its processes end")
                    wait_until(lambda: not home.exists(), "its folder goes")
            finally:
                node.stop()


RANGES = ("", "x-y", "70000", "0-70000", "999-70000", "70001-70000", "70000-99999999999")


@pytest.mark.parametrize("text", RANGES)
def test_a_range_that_cannot_be_is_refused(text):
    with pytest.raises(SecurityError, match="--user-per-job"):
        Users(text)


def test_a_range_of_accounts_is_refused():
    with pytest.raises(SecurityError, match="is nobody here"):
        Users("65000-66000")


def test_users_come_again_only_when_they_are_free_and_their_turn_is(monkeypatch):
    before = os.umask(0o022)
    try:
        users = Users(f"{FIRST}-{FIRST + 2}")
        assert [users.take() for _ in range(3)] == [FIRST, FIRST + 1, FIRST + 2]
        with pytest.raises(NoUserError):
            users.take()
        users.end(FIRST + 1)
        assert users.take() == FIRST + 1
        users.end(FIRST)
        users.end(FIRST + 2)
        assert users.take() == FIRST + 2, "the one that was free for longest"
    finally:
        os.umask(before)


def test_what_is_given_away_is_never_reached_through_a_link(tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.write_text("mine")
    (theirs / "folder").mkdir(parents=True)
    (theirs / "link").symlink_to(mine)
    (theirs / "folder" / "up").symlink_to(tmp_path)
    give(theirs, FIRST)
    assert mine.stat().st_uid == tmp_path.stat().st_uid == os.getuid()
    assert (theirs / "link").lstat().st_uid == (theirs / "folder").stat().st_uid == FIRST
