"""`heterps ps save`, `load`, `export`, `publish`, `follow`, `shrink` and `scale` on real shards."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from heterps.errors import OK, UNREACHABLE, USAGE
from ps import LocalShards, LocalTable, ParameterClient
from ps.table.rules import Eviction

ROOT = Path(__file__).resolve().parents[3]
N = np.arange(300)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def shards() -> Iterator[LocalShards]:
    with LocalShards(2) as running:
        yield running


@pytest.fixture
def client(shards: LocalShards) -> Iterator[ParameterClient]:
    with ParameterClient(shards.addresses) as connected:
        connected.create_table("user", 4, optimizer="sgd", eviction=Eviction(ttl_steps=5))
        connected.push("user", N, np.ones((300, 4), np.float32), step=1)
        yield connected
        connected.drop_tables("user")


@pytest.fixture
def option(shards: LocalShards) -> tuple[str, str]:
    return "--shards", ",".join(shards.addresses)


def test_save_and_load(
    run: Run, client: ParameterClient, option: tuple[str, str], tmp_path: Path
) -> None:
    code, out, _ = run("ps", "save", str(tmp_path / "ck"), *option, "--json")
    assert code == OK
    found = json.loads(out)
    assert (found["mode"], found["rows"], found["tables"]) == ("checkpoint", 300, ["user"])
    before = client.pull("user", N)
    client.push("user", N, np.ones((300, 4), np.float32))
    code, out, _ = run("ps", "save", *option, str(tmp_path / "d"), "--mode", "delta", "--since",
                       str(tmp_path / "ck"))  # fmt: skip
    assert code == OK
    assert out.startswith("saved 300 rows")
    after = client.pull("user", N)
    code, out, _ = run("ps", "load", str(tmp_path / "ck"), *option, "--json")
    assert (code, json.loads(out)["rows"]) == (OK, 300)
    np.testing.assert_array_equal(client.pull("user", N), before)
    assert run("ps", "load", str(tmp_path / "d"), *option)[1].startswith("loaded 300 rows")
    np.testing.assert_array_equal(client.pull("user", N), after)


def test_export(run: Run, client: ParameterClient, option: tuple[str, str], tmp_path: Path) -> None:
    base, dense = str(tmp_path / "base"), str(tmp_path / "d.safetensors")
    save_file({"w": np.ones(3, np.float32)}, dense)
    assert run("ps", "save", *option, "--mode", "base", base)[0] == OK
    code, out, _ = run("ps", "export", base, str(tmp_path / "pq"), "--dense", dense, "--json")
    assert code == OK
    found = json.loads(out)
    assert [f["name"] for f in found["files"]] == ["dense.safetensors", "tables/user.parquet"]
    table = pq.read_table(tmp_path / "pq" / "tables" / "user.parquet")
    assert sorted(table["key"].to_pylist()) == N.tolist()
    code, out, _ = run("ps", "export", base, str(tmp_path / "st"), "--format", "safetensors",
                       "--dtype", "float16", "--table", "user")  # fmt: skip
    assert code == OK
    assert "tables/user.safetensors: 300 rows" in out
    rows = load_file(tmp_path / "st" / "tables" / "user.safetensors")
    wanted = client.pull("user", rows["user.keys"]).astype(np.float16)
    np.testing.assert_array_equal(rows["user.values"], wanted)
    code, _, err = run("ps", "export", base, str(tmp_path / "st"))
    assert code == USAGE
    assert "holds an export" in err
    assert run("ps", "export", base, str(tmp_path / "st"), "--replace")[0] == OK


def test_publish_and_follow(
    run: Run,
    client: ParameterClient,
    option: tuple[str, str],
    tmp_path: Path,
    interruptible: list[str],
) -> None:
    place = str(tmp_path / "feed")
    code, _, err = run("ps", "follow", place, "--once")
    assert code == USAGE
    assert "latest.json: not found" in err
    assert run("ps", "publish", place, *option, "--once")[1].startswith("published base-")
    assert run("ps", "publish", place, *option, "--once")[1] == "nothing has changed\n"
    argv = [*interruptible, "ps", "follow", place, "--interval", "0.1", "--json"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            first = json.loads(process.stdout.readline())
            assert (first["rows"], first["tables"]) == (300, {"user": 300})
            client.push("user", [7], np.ones((1, 4), np.float32), step=9)
            code, out, _ = run("ps", "shrink", "user", "--step", "9", *option, "--json")
            assert (code, json.loads(out)["removed"]) == (OK, 299)
            code, out, _ = run("ps", "publish", place, *option, "--once", "--json")
            assert (code, json.loads(out)["rows"]) == (OK, 1)
            for line in process.stdout:
                told = json.loads(line)
                if told["deltas"]:
                    break
            assert (told["removed"], told["tables"]) == (299, {"user": 1})
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    _, out, _ = run("ps", "follow", place, "--once")
    assert out.startswith("applied base-")
    assert "300 rows" not in out.partition(";")[2]


def test_scale(run: Run, tmp_path: Path) -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
        client.create_table("user", 4)
        client.push("user", N, np.ones((300, 4), np.float32))
        rows = client.pull("user", N)
        named = ",".join(shards.addresses)
        more = f"{named},{shards.add()}"
        code, out, _ = run("ps", "scale", "--shards", named, "--to", more, "--json")
        assert code == OK
        assert json.loads(out)["shards"] == more.split(",")
        assert 50 < json.loads(out)["moved_rows"] < 150
        np.testing.assert_array_equal(client.pull("user", N), rows)
        code, out, _ = run("ps", "scale", "--shards", more, "--to", named)
        assert code == OK
        assert out.startswith("3 -> 2 shards: moved ")
        code, _, err = run("ps", "scale", "--shards", named, "--to", f"{named},{named}")
        assert code == USAGE
        assert "named twice" in err


def test_mistakes_are_explained(
    run: Run, client: ParameterClient, option: tuple[str, str], tmp_path: Path
) -> None:
    here = str(tmp_path)
    table = LocalTable.create("t", 2)
    table.save(tmp_path / "ck")
    for arguments, said in (
        (["load", f"{here}/none", *option], "manifest.json: not found"),
        (["save", f"{here}/x", *option, "--mode", "delta"], "since=None"),
        (["save", here, *option], "exists and is not a checkpoint"),
        (["export", f"{here}/ck", f"{here}/o", "--table", "tt"], "did you mean 't'?"),
        (["export", f"{here}/ck", f"{here}/o", "--format", "csv"], "'csv'"),
        (["export", f"{here}/ck", "nowhere://x"], "nowhere"),
        (["shrink", "usr", *option], "did you mean 'user'?"),
        (["scale", *option, "--to", "host"], "expected HOST:PORT"),
        (["follow", here, "--interval", "0"], "--interval"),
    ):
        code, _, err = run("ps", *arguments)
        assert code == USAGE, arguments
        assert said in err
    code, _, err = run("ps", "save", f"{here}/x", "--shards", "127.0.0.1:1")
    assert code == UNREACHABLE
    assert "127.0.0.1:1" in err


def test_help_lists_them(run: Run) -> None:
    code, out, _ = run("ps", "--help")
    assert code == OK
    for word in ("save", "load", "export", "publish", "follow", "shrink", "scale", "stats"):
        assert f"heterps ps {word}" in out
        assert run("ps", word, "--help")[0] == OK
