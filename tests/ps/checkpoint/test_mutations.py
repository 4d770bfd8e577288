"""Manifests and feeds that say anything: refused, or what was saved, within little memory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps import CheckpointError, LocalTable
from ps.checkpoint.manifest import is_gone, read_manifest
from ps.checkpoint.store import LocalStore
from ps.local.table import save_checkpoint
from tests.ps.checkpoint.manifests import as_version_2, rewrite

KEYS = np.arange(500)

# Whatever is read may take little more memory than the process has.
_CHILD = """
import copy, json, resource, sys
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ps import CheckpointError, LocalTable
from ps.checkpoint.manifest import read_manifest
from ps.checkpoint.store import LocalStore
from ps.serving.feed import read_feed
from tests.ps.checkpoint.manifests import sealed

place, feed, examples = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
path = place / "manifest.json"
good = path.read_bytes()
tree = json.loads(good)
keys = np.arange(500)
LocalTable.load_checkpoint(place)
rule = settings(
    max_examples=examples, deadline=None, database=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)

@contextmanager
def little_memory():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def loads():
    try:
        with little_memory():
            rows = LocalTable.load_checkpoint(place)["t"].pull(keys)
    except CheckpointError as error:
        assert "manifest.json" in str(error) or "save-" in str(error), error
        return False
    assert (rows == 7).all(), "other rows than were saved"
    return True

@rule
@given(st.data())
def bytes_that_change(data):
    changed = bytearray(good)
    at = data.draw(st.integers(0, len(good) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "insert", "double"]))
    if how == "flip":
        changed[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del changed[at:at + data.draw(st.integers(1, len(good)))]
    elif how == "insert":
        changed[at:at] = data.draw(st.binary(min_size=1, max_size=30))
    else:
        changed[at:at] = changed[at:at + 200]
    path.write_bytes(changed)
    assert bytes(changed) == good or not loads(), (how, at)

anything = st.one_of(
    st.none(), st.booleans(), st.sampled_from(["", "t", "u", "x" * 100_000, "\\ud800", "save-1"]),
    st.sampled_from([-1, 0, 1, 2, 3, 1024, 1025, 2**31, 2**40, 2**63, 2**64, 10**300, -(2**70)]),
    st.floats(), st.just([]), st.just({}), st.just([[]]), st.just([0] * 1024),
    st.just([2**40] * 1024), st.just({"a": {"b": []}}), st.just({"place": "/nowhere", "id": "x"}),
)

def nodes(value, where=()):
    yield where
    if isinstance(value, dict):
        for name, each in value.items():
            yield from nodes(each, (*where, name))
    elif isinstance(value, list):
        for index, each in enumerate(value[:3]):
            yield from nodes(each, (*where, index))

WHERE = [where for where in nodes(tree) if where and where[0] not in ("tables", "sha256")]
# Where rows lie is believed of whoever can make a true checksum; the rest must fit together.
BELIEVED = ("route", "positions", "created", "torn", "log", "generations", "runs")

@rule
@given(st.data())
def fields_that_change(data):
    where = data.draw(st.sampled_from(WHERE))
    changed = copy.deepcopy(tree)
    inner = changed
    for step in where[:-1]:
        inner = inner[step]
    if data.draw(st.booleans()):
        inner[where[-1]] = data.draw(anything)
    elif isinstance(inner, dict):
        del inner[where[-1]]
    elif len(inner) > where[-1]:
        del inner[where[-1]]
    old = data.draw(st.booleans())
    if old:
        del changed["sha256"]
        if changed.get("version") == 3:
            changed["version"] = 2
        path.write_text(json.dumps(changed))
    else:
        path.write_bytes(sealed(changed))
    if where[0] == "route":
        with suppress(CheckpointError), little_memory():
            read_manifest(LocalStore(place))
    elif loads():
        assert changed == tree or where[0] in BELIEVED or old, where

@rule
@given(st.data())
def feeds_that_change(data):
    whole = json.loads((feed / "latest.json").read_text())
    where = data.draw(st.sampled_from([w for w in nodes(whole) if w]))
    changed = copy.deepcopy(whole)
    inner = changed
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = data.draw(anything)
    other = feed / "other"
    other.mkdir(exist_ok=True)
    (other / "latest.json").write_text(json.dumps(changed))
    try:
        with little_memory():
            read_feed(LocalStore(other))
    except CheckpointError as error:
        assert "latest.json" in str(error)

bytes_that_change()
fields_that_change()
feeds_that_change()
for many in (b"[" * 10**6, b'{"a":' * 10**6, b" " * (33 << 20), b'{"a":' + b"1" * 9999 + b"}"):
    path.write_bytes(many)
    assert not loads()
path.write_bytes(good)
assert loads()
print("ok")
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A save of one process: 500 rows of `t` that are all 7, and an empty table."""
    table = LocalTable.create("t", 2, initializer="zeros")
    table.push(KEYS, np.full((500, 2), 7, np.float32), kind="assign")
    save_checkpoint(tmp_path / "ck", [table, LocalTable.create("u", 1)])
    return tmp_path / "ck"


@pytest.mark.parametrize("examples", [40, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_what_was_changed_is_refused_or_harmless(
    saved: Path, tmp_path: Path, examples: int
) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    entry = {"name": "base-000000000-00000000", "id": "save-000000000000000-00000000", "number": 0}
    delta = {"name": "delta-000000001-00000000", "id": entry["id"], "number": 1}
    tree = {"format": "heterps-feed", "version": 1, "stream": "s", "updated": 1.0}
    (feed / "latest.json").write_text(json.dumps({**tree, "bases": [entry], "deltas": [delta]}))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(saved), str(feed), str(examples)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout == "ok\n", done.stderr[-3000:]


def test_saves_without_a_checksum_still_load(saved: Path) -> None:
    as_version_2(saved)
    table = LocalTable.load_checkpoint(saved)["t"]
    assert (table.pull(KEYS) == 7).all()
    save_checkpoint(saved, [table])  # over it, as over any other
    assert (LocalTable.load_checkpoint(saved)["t"].pull(KEYS) == 7).all()
    assert len(list(saved.glob("save-*"))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree["files"].pop(0), "names no file of table 't'"),
        (lambda tree: tree["tables"].pop("u"), "names a file, but no spec, of table 'u'"),
        (lambda tree: tree["files"].append(tree["files"][0]), "twice"),
        (lambda tree: tree.update(shards=10**9), "shards: 1000000000; expected a whole number"),
        (lambda tree: tree.update(shards=2), "of 0 shards; expected 2"),
        (lambda tree: tree["files"][0].update(rows=499), "has 500 rows"),
        (lambda tree: tree["files"][0].update(rows=2**60), "rows: .* expected a whole number"),
        (lambda tree: tree["files"][0].update(shard=True), "shard: True; expected a whole number"),
        (lambda tree: tree.update(extra=1), "unknown field 'extra'"),
    ],
    ids=range(9),
)
def test_what_a_manifest_must_say(
    saved: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=message):
        LocalTable.load_checkpoint(saved)


def test_only_what_was_begun_long_ago_is_taken_for_given_up() -> None:
    assert is_gone("save-000000000000001-00000000")
    assert not is_gone("save-999999999999999-00000000")
    assert not is_gone("thesis")


@pytest.mark.parametrize("name", ["manifest.json", "table"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, name: str, kind: str
) -> None:
    table = LocalTable.create("t", 2)
    table.pull(KEYS)
    table.save(tmp_path)
    path = tmp_path / name
    if name == "table":
        path = tmp_path / read_manifest(LocalStore(tmp_path)).files[0].name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)  # nobody ever writes to it
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        LocalTable.load_checkpoint(tmp_path)
