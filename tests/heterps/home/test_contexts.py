"""Contexts: the file, which cluster a command means, and with which credentials it is asked."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chassis.process import Child, spawn
from chassis.security import VARIABLES, Security
from chassis.servers import Server
from heterps.client.client import Client
from heterps.errors import OK, UNREACHABLE, USAGE, ContextError
from heterps.home import certs, contexts
from heterps.home.target import Target
from protos.scheduler_pb2 import ListNodesReply
from protos.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from tests.cluster import Roles

ROOT = Path(__file__).resolve().parents[3]
AWAY = "127.0.0.1:1"
Run = Callable[..., tuple[int, str, str]]


class _Scheduler(SchedulerServicer):
    def ListNodes(self, request, context):
        return ListNodesReply()


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server with TLS and a token, and the folder of its files; the environment names none."""
    folder = tmp_path / "certs"
    files = certs.make(folder)
    server = Server("scheduler", "127.0.0.1:0", security=Security.from_files(files))
    server.add(add_SchedulerServicer_to_server, _Scheduler(), "heterps.v1.Scheduler")
    yield server.start(), folder
    server.stop(0.1)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Child]:
    with Roles(tmp_path) as roles:
        yield roles.scheduler()


def put(name: str, address: str, **files: str) -> None:
    contexts.set_context(name, {"scheduler": address, **files})


def test_a_context_is_added_shown_used_and_removed(run: Run, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs.make(folder)
    files = ["--ca", str(folder / certs.CA), "--token-file", str(folder / certs.TOKEN)]
    code, out, _ = run("context", "set", "prod", "--scheduler", "10.0.0.5:7000", *files)
    assert (code, "heterps context use prod" in out) == (OK, True)
    assert run("context", "use", "prod")[0] == OK
    code, out, _ = run("context", "list", "--json")
    local, prod = json.loads(out)
    assert (local["name"], local["current"], local["scheduler"]) == ("local", False, None)
    assert prod == {
        "name": "prod",
        "current": True,
        "scheduler": "10.0.0.5:7000",
        "ca": str(folder / certs.CA),
        "cert": None,
        "key": None,
        "token_file": str(folder / certs.TOKEN),
    }
    assert json.loads(run("context", "show", "--json")[1]) == prod
    assert "10.0.0.5:7000" in run("context", "show", "prod")[1]
    assert "10.0.0.5:7000" in run("context", "list")[1]
    assert run("context", "set", "prod", "--scheduler", "10.0.0.6:7000")[0] == OK
    changed = json.loads(run("context", "show", "prod", "--json")[1])
    assert changed == {**prod, "scheduler": "10.0.0.6:7000"}, "what is not given stays"
    secret = (folder / certs.TOKEN).read_text().strip()
    assert secret not in contexts.path().read_text()
    assert stat.S_IMODE(contexts.path().stat().st_mode) == 0o600
    assert sorted(one.name for one in home.iterdir()) == ["contexts.lock", "contexts.yaml"]
    code, out, _ = run("context", "remove", "prod")
    assert (code, "heterps context use" in out) == (OK, True)
    assert contexts.load() == contexts.Contexts()


def test_paths_are_kept_absolute(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certs.make(tmp_path / "certs")
    monkeypatch.chdir(tmp_path)
    assert run("context", "set", "a", "--scheduler", "h:1", "--ca", "certs/ca.pem")[0] == OK
    assert contexts.load().named["a"].ca == str(tmp_path / "certs" / "ca.pem")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["set", "prod"], "expected --scheduler HOST:PORT"),
        (["set", "prod", "--scheduler", "host"], "--scheduler: got 'host', expected HOST:PORT"),
        (["set", "prod", "--scheduler", "h:70000"], "expected HOST:PORT"),
        (["set", "prod", "--scheduler", "a b:7000"], "expected HOST:PORT"),
        (["set", "prod", "--scheduler", "h:1", "--ca", "absent.pem"], "absent.pem: No such file"),
        (["set", "prod", "--scheduler", "h:1", "--token-file", "t"], "expected --ca FILE with it"),
        (["set", "a/b", "--scheduler", "h:1"], "context 'a/b': expected up to 63"),
        (["set", "local", "--scheduler", "h:1"], "heterps context set NAME"),
        (["use", "prdo"], "did you mean prod?"),
        (["show", "other"], "heterps context list"),
        (["remove", "other"], "no context 'other'"),
        (["remove", "local"], "heterps down"),
        (["set", "prod", "--scheduler", "h:1", "--ca", "absent.pem"], "`heterps context set prod`"),
    ],
)
def test_wrong_arguments_change_nothing(run: Run, arguments: list[str], said: str) -> None:
    if arguments[0] != "set":
        put("prod", "10.0.0.5:7000")
    before = contexts.path().read_bytes() if contexts.path().exists() else None
    code, _, err = run("context", *arguments)
    assert code == USAGE
    assert said in err
    assert (contexts.path().read_bytes() if contexts.path().exists() else None) == before


def test_half_a_pair_is_refused(run: Run, tmp_path: Path) -> None:
    certs.make(tmp_path / "certs")
    cert = str(tmp_path / "certs" / certs.CERTIFICATE)
    code, _, err = run("context", "set", "prod", "--scheduler", "h:1", "--cert", cert)
    assert code == USAGE
    assert "--cert and --key go together" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("contexts: {p: {scheduler: h}}", "contexts.yaml:1: contexts.p.scheduler: got 'h'"),
        ("contexts:\n  p:\n    schedular: h:1", "contexts.yaml:3: contexts.p.schedular: unknown"),
        ("contexts:\n  p: {scheduler: h:1, token: hush}", "expected token_file: PATH"),
        ("contexts: [1]", "contexts.yaml:1: contexts: got a list"),
        ("contexts: {p: {scheduler: [h]}}", "contexts.p.scheduler: got a list, expected text"),
        ("- p", "expected a mapping"),
        ("contexts: {", "contexts.yaml:1: not valid YAML"),
        ("current: gone", "contexts.yaml: current: no context 'gone'"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(run: Run, text: str, said: str) -> None:
    contexts.path().write_text(text)
    code, _, err = run("jobs")
    assert code == USAGE
    assert said in err
    assert "hush" not in err
    assert "`" in err.splitlines()[-1], "what to type next"


def test_those_that_write_at_once_lose_nothing() -> None:
    code = "import sys; from heterps import cli; sys.exit(cli.main(sys.argv[1:]))"
    names = [f"c{number}" for number in range(3)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, "context", "set", name, "--scheduler", "h:1"],
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
        )
        for name in names
    ]
    assert [one.wait(60) for one in started] == [OK] * 3
    assert list(contexts.load().named) == names


def test_what_goes_before_what(monkeypatch: pytest.MonkeyPatch) -> None:
    put("named", "named:1")
    put("now", "now:1")
    contexts.use("now")
    assert Target.find().address == "now:1"
    monkeypatch.setenv("HETERPS_SCHEDULER", "environment:1")
    assert Target.find().address == "environment:1"
    monkeypatch.setenv("HETERPS_CONTEXT", "named")
    assert Target.find().address == "named:1"
    assert Target.find(context="now").address == "now:1"
    assert Target.find(address="option:1") == Target("option:1"), "with no context's files"
    with pytest.raises(ContextError, match="expected one of them"):
        Target.find("option:1", "now")


def test_what_up_left_is_last(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    put("away", AWAY)
    contexts.use("away")
    code, _, err = run("jobs")
    assert code == UNREACHABLE
    assert f"{AWAY} (context away)" in err
    assert "heterps context show away" in err
    assert "no cluster is running here" in run("jobs", "--context", "local")[2]
    monkeypatch.setenv("HETERPS_CONTEXT", "local")
    assert "no cluster is running here" in run("jobs")[2]
    monkeypatch.delenv("HETERPS_CONTEXT")
    assert run("context", "use", "local")[0] == OK
    assert "heterps up" in run("jobs")[2]


def test_a_name_that_is_unknown_says_who_said_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    put("prod", "10.0.0.5:7000")
    assert "context: no context 'prd'" in run("status", "--context", "prd")[2]
    monkeypatch.setenv("HETERPS_CONTEXT", "prd")
    code, _, err = run("logs")
    assert code == USAGE
    assert "HETERPS_CONTEXT=prd: no context 'prd'" in err
    assert "did you mean prod?" in err


def test_credentials_of_a_context_reach_its_cluster(
    secured: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = secured
    token = str(folder / certs.TOKEN)
    put("prod", address, ca=str(folder / certs.CA), token_file=token)
    with Client(context="prod") as client:
        assert client.nodes() == []
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 32)
    put("prod", address, token_file=str(wrong))
    with Client(context="prod") as client, pytest.raises(Exception, match="context set prod --ca"):
        client.nodes()
    contexts.use("prod")
    monkeypatch.setenv("HETERPS_TOKEN_FILE", token)
    with Client() as client:  # the environment goes before the current context
        assert client.nodes() == []
    with Client(context="prod") as client, pytest.raises(Exception, match="refuses us"):
        client.nodes()  # a context that is named goes before the environment
    wrong.unlink()
    with pytest.raises(ContextError, match=r"contexts\.prod\.token_file=.*wrong: No such file"):
        Client(context="prod")


def test_exported_files_are_those_of_the_context_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = certs.make(tmp_path / "one"), certs.make(tmp_path / "other")
    for variable, path in other.items():
        monkeypatch.setenv(variable, path)
    put("one", "h:1", ca=one["HETERPS_TLS_CA"])
    contexts.use("one")
    with Target.find(context="one").exported():
        assert os.environ["HETERPS_TLS_CA"] == one["HETERPS_TLS_CA"]
        assert "HETERPS_TOKEN_FILE" not in os.environ, "it is another cluster's"
        assert os.environ["HETERPS_TLS_KEY"] == other["HETERPS_TLS_KEY"], "it is this machine's"
    with Target.find().exported():
        assert {v: os.environ[v] for v in VARIABLES} == other
    assert {v: os.environ[v] for v in VARIABLES} == other


def test_commands_and_shards_find_a_scheduler_by_context(
    run: Run, scheduler: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("lab", scheduler.address)
    put("away", AWAY)
    contexts.use("away")
    for options in (["--context", "lab"], ["--scheduler", scheduler.address]):
        code, out, _ = run("status", *options)
        assert (code, scheduler.address in out) == (OK, True)
    monkeypatch.setenv("HETERPS_CONTEXT", "lab")
    argv = [sys.executable, "-m", "heterps", "ps"]
    shard = spawn("shard", argv, directory=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    try:
        shard.wait_ready(60)
        assert f"joins the scheduler at {scheduler.address} (context lab)" in shard.log.read_text()
        monkeypatch.delenv("HETERPS_CONTEXT")
        code, out, _ = run("ps", "stats", "--context", "lab")
        assert (code, shard.address in out) == (OK, True)
        assert run("ps", "stats")[0] == UNREACHABLE
    finally:
        shard.stop(10)
    code, _, err = run("jobs", "--scheduler", "a:1", "--context", "lab")
    assert (code, "expected one" in err) == (USAGE, True)


def test_a_shard_stands_alone_unless_a_context_is_named(tmp_path: Path) -> None:
    put("away", AWAY)
    contexts.use("away")
    shard = spawn("shard", [sys.executable, "-m", "heterps", "ps"], directory=tmp_path)
    try:
        shard.wait_ready(60)
        assert "joins" not in shard.log.read_text()
    finally:
        shard.stop(10)
