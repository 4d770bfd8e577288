"""`heterps ps`: looking into real shards, and still running one."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from heterps.errors import OK, UNREACHABLE, USAGE
from ps import LocalShards, ParameterClient
from tests.cluster import Roles

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def shards() -> Iterator[LocalShards]:
    with LocalShards(2) as running, ParameterClient(running.addresses) as client:
        client.create_table("user", 4, initializer="uniform", scale=0.5, seed=1)
        client.create_table("empty", 2)
        client.push("user", np.arange(1000), np.ones((1000, 4), np.float32))
        client.pull("user", np.arange(1200))
        yield running


@pytest.fixture
def option(shards: LocalShards) -> tuple[str, str]:
    return "--shards", ",".join(shards.addresses)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_stats_for_programs(run: Run, shards: LocalShards, option: tuple[str, str]) -> None:
    code, out, _ = run("ps", "stats", *option, "--json")
    found = json.loads(out)["shards"]
    assert code == OK
    assert [one["address"] for one in found] == shards.addresses
    tables = [{t["name"]: t for t in one["tables"]} for one in found]
    assert sum(one["user"]["rows"] for one in tables) == 1000
    assert sum(one["user"]["pushed"] for one in tables) == 1000
    assert sum(one["user"]["missed"] for one in tables) == 200
    for one in found:
        assert one["up"]
        assert one["resident_bytes"] > 1e6
    for one in tables:
        user, empty = one["user"], one["empty"]
        assert user["bytes_per_row"] == pytest.approx(user["bytes"] / user["rows"])
        assert user["hit_rate"] == 1 - user["missed"] / user["pulled"]
        assert (empty["rows"], empty["bytes_per_row"], empty["hit_rate"]) == (0, None, None)


def test_stats_for_people(run: Run, shards: LocalShards, option: tuple[str, str]) -> None:
    code, out, _ = run("ps", "stats", *option)
    assert code == OK
    for number, address in enumerate(shards.addresses):
        assert f"Shard {number} at {address}" in out
    assert out.count("B/row") == 4  # a table a shard, one of both, and the legend
    together = out[out.index("Together, 2 shards") :]
    (user,) = [line.split() for line in together.splitlines() if line.strip().startswith("user")]
    assert user[1:3] == ["4", "1,000"]
    assert "on disk" not in out, "columns that hold nothing are left out"
    assert max(map(len, out.splitlines())) <= 80


def test_a_shard_that_is_away_hides_no_other(run: Run, shards: LocalShards) -> None:
    away = f"127.0.0.1:{closed_port()}"
    named = ("--shards", f"{shards.addresses[0]},{away}")
    code, out, _ = run("ps", "stats", *named)
    assert code == UNREACHABLE
    assert "did not answer" in out
    assert "user" in out
    code, out, _ = run("ps", "stats", *named, "--json")
    assert code == UNREACHABLE
    assert [one["up"] for one in json.loads(out)["shards"]] == [True, False]


def test_get_reads_rows_and_makes_none(
    run: Run, shards: LocalShards, option: tuple[str, str]
) -> None:
    keys = ["5", "0x10", "-3", "18446744073709551615"]
    code, out, _ = run("ps", "get", "user", *keys, *option, "--json")
    assert code == OK
    found = json.loads(out)
    wanted = [5, 16, 2**64 - 3, 2**64 - 1]
    assert [row["key"] for row in found["rows"]] == wanted
    with ParameterClient(shards.addresses) as client:
        rows = client.pull("user", np.array(wanted, np.uint64), read_only=True)
        assert sum(s.tables[-1].rows for s in client.stats()) == 1000, "get makes no row"
    np.testing.assert_array_equal(np.float32([row["values"] for row in found["rows"]]), rows)
    _, out, _ = run("ps", "get", "user", *option, *keys)
    assert [line.partition(":")[0] for line in out.splitlines()] == keys
    np.testing.assert_allclose(np.float32(out.splitlines()[0].split()[1:]), rows[0], rtol=1e-5)


@pytest.mark.skipif(not hasattr(ParameterClient, "keys"), reason="the client cannot list keys")
def test_keys_are_those_with_rows(run: Run, option: tuple[str, str]) -> None:
    code, out, _ = run("ps", "keys", "user", *option, "--limit", "5000")
    assert code == OK
    assert sorted(map(int, out.split())) == list(range(1000))
    _, out, _ = run("ps", "keys", "user", *option, "--limit", "7", "--json")
    found = json.loads(out)
    assert len(found["keys"]) == 7
    assert set(found["keys"]) <= set(range(1000))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["get", "usr", "1"], "did you mean 'user'?"),
        (["get", "user", "x"], "'x': expected an integer of 64 bits"),
        (["get", "user", "18446744073709551616"], "expected an integer of 64 bits"),
        (["get", "user"], "Missing argument"),
        (["keys", "user", "--limit", "0"], "--limit"),
        (["stat"], "No such command 'stat'"),
    ],
)
def test_mistakes_are_explained(
    run: Run, option: tuple[str, str], arguments: list[str], said: str
) -> None:
    code, _, err = run("ps", *arguments, *(option if len(arguments) > 1 else ()))
    assert code == USAGE
    assert said in err


@pytest.mark.parametrize("text", ["host", "127.0.0.1:x", ":7100", ","])
def test_shards_are_named_by_address(run: Run, text: str) -> None:
    code, _, err = run("ps", "stats", "--shards", text)
    assert code == USAGE
    assert "expected HOST:PORT" in err


def test_get_says_which_shard_is_away(run: Run) -> None:
    away = f"127.0.0.1:{closed_port()}"
    code, _, err = run("ps", "get", "user", "1", "--shards", away)
    assert code == UNREACHABLE
    assert away in err


def test_the_clusters_standing_shards_are_found(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Roles(tmp_path) as roles:
        scheduler = roles.scheduler()
        monkeypatch.setenv("HETERPS_SCHEDULER", scheduler.address)
        code, _, err = run("ps", "stats")
        assert code == USAGE
        assert "no standing shards" in err
        shard = roles.start("heterps", "ps", "--scheduler", scheduler.address)
        code, out, _ = run("ps", "stats")
        assert code == OK
        assert shard.address in out
        assert "no tables" in out


def test_options_alone_run_a_shard(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    argv = [sys.executable, "-m", "heterps", "ps", "--bind", "127.0.0.1:0", "--ready-file", ready]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "listens on" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_help_shows_both_uses(run: Run) -> None:
    code, out, _ = run("ps", "--help")
    assert code == OK
    for part in ("heterps ps stats", "heterps ps keys", "heterps ps get", "--bind"):
        assert part in out
    assert run("ps", "stats", "--help")[0] == OK
