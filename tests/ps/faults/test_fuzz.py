"""Whatever is sent to a shard ends in a reply or a status, and changes no row it should not."""

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError, Message

from chassis.channels import connect
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import LocalShards, LocalTable, ParameterClient
from ps.engine import _native
from ps.shm.line import UnixLine
from ps.shm.region import MOST_BYTES, Region

PATH = "/heterps.v1.ParameterServer/"
OPTIONS: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.5, "scale": 1.0, "seed": 1}
TABLES = {"plain": 4, "logged": 3}
KEYS = np.array([*range(200), 2**32, 2**63, 2**64 - 1], np.uint64)
BAD = grpc.StatusCode.INVALID_ARGUMENT
REFUSALS = {
    BAD,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
}


@dataclass
class Target:
    """A shard, and tables of this process that have had the same pushes."""

    shards: LocalShards
    client: ParameterClient
    channel: grpc.Channel
    twins: dict[str, LocalTable] = field(default_factory=dict)

    def call(self, method: str, request: bytes) -> bytes:
        """Raw bytes in and out."""
        invoke: Callable[..., bytes] = self.channel.unary_unary(PATH + method)
        return invoke(request, timeout=20)

    def refused(self, method: str, request: bytes | Message) -> grpc.StatusCode:
        """The status of what must not be answered."""
        if isinstance(request, Message):
            request = request.SerializeToString()
        with pytest.raises(grpc.RpcError) as error:
            self.call(method, request)
        assert error.value.details()
        code: grpc.StatusCode = error.value.code()
        return code

    def check(self) -> None:
        """The shard lives, and its rows are those of the twins."""
        assert self.shards.processes[0].poll() is None
        for name, twin in self.twins.items():
            keys = np.union1d(KEYS, twin.keys())
            np.testing.assert_array_equal(self.client.pull(name, keys), twin.pull(keys))
            held = self.client.keys(name, 1 << 20)
            assert sorted(held.tolist()) == sorted(twin.keys().tolist())


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Target]:
    with (
        LocalShards(1) as shards,
        ParameterClient(shards.addresses, timeout_s=20, shared_memory=False) as client,
        connect(shards.addresses[0]) as channel,
    ):
        target = Target(shards, client, channel)
        for name, dim in TABLES.items():
            durability = {"durability": "log"} if name == "logged" else {}
            client.create_table(name, dim, **OPTIONS, **durability)
            target.twins[name] = LocalTable.create(name, dim, **OPTIONS)
            grads = np.random.default_rng(dim).standard_normal((len(KEYS), dim))
            client.push(name, KEYS, grads)
            target.twins[name].push(KEYS, grads)
        yield target
        # All that was taken can be taken again: the log has nothing that stops a shard.
        target.check()
        shards.restart(0)
        del target.twins["plain"]  # which nothing keeps
        target.check()


@pytest.fixture
def target(fuzzed: Target) -> Iterator[Target]:
    yield fuzzed
    fuzzed.check()


def pull_of(count: int = 3, **fields: Any) -> bytes:
    head = {"table": "plain", "dim": 4, "count": count} | fields
    return pack(pb.PullRequest(**head), KEYS[:count])


def push_of(value: float = 1.0, rows: Any = None, **fields: Any) -> bytes:
    """A push of three rows to `plain`, which is right but for `fields`."""
    head = {
        "table": "plain", "dim": 4, "count": 3, "client": "f", "epoch": 1, "sequence": 1,
    } | fields  # fmt: skip
    grads = np.full((3, 4), value, np.float32) if rows is None else rows
    return pack(pb.PushRequest(**head), KEYS[:3], grads)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"table": "none"}, grpc.StatusCode.NOT_FOUND),
        ({"table": "\0" * 500}, grpc.StatusCode.NOT_FOUND),
        ({"dim": 5}, BAD),
        ({"dim": 3}, BAD),
        ({"dim": 0}, BAD),
        ({"dim": 2**32 - 1}, BAD),
        ({"count": 2}, BAD),
        ({"count": 4}, BAD),
        ({"count": 0}, BAD),
        ({"count": 2**40}, BAD),
        ({"count": 2**61}, BAD),
        ({"count": 2**64 - 1}, BAD),
        ({"key_bytes": 4}, BAD),
        ({"key_bytes": 7}, BAD),
        ({"key_bytes": 2**32 - 1}, BAD),
        ({"dtype": "int8"}, BAD),
        ({"dtype": "float16" * 100}, BAD),
        ({"route": 7}, grpc.StatusCode.ABORTED),
        ({"region": "heterps-" + "0" * 32}, BAD),
        ({"region": "../../etc/passwd"}, BAD),
    ],
    ids=str,
)
@pytest.mark.parametrize("prefetch", [False, True])
def test_wrong_pulls(
    target: Target, fields: dict[str, Any], code: grpc.StatusCode, prefetch: bool
) -> None:
    request = pack(
        pb.PullRequest(**{"table": "plain", "dim": 4, "count": 3, "prefetch": prefetch} | fields),
        KEYS[:3],
    )
    assert target.refused("Pull", request) == code


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"table": "none"}, grpc.StatusCode.NOT_FOUND),
        ({"dim": 0}, BAD),
        ({"dim": 0, "count": 9}, BAD),
        ({"dim": 3}, BAD),
        ({"table": "logged"}, BAD),
        ({"table": "logged", "dim": 0, "count": 9}, BAD),
        ({"count": 2}, BAD),
        ({"count": 0}, BAD),
        ({"count": 2**62}, BAD),
        ({"key_bytes": 4}, BAD),
        ({"key_bytes": 16}, BAD),
        ({"dtype": "float16"}, BAD),
        ({"dtype": "int8"}, BAD),
        ({"dtype": "float64"}, BAD),
        ({"usage": True}, BAD),
        ({"kind": "erase"}, BAD),
        ({"rate": float("nan")}, BAD),
        ({"rate": float("inf")}, BAD),
        ({"rate": -1.0}, BAD),
        ({"client": ""}, BAD),
        ({"client": "x" * 257}, BAD),
        ({"route": 7}, grpc.StatusCode.ABORTED),
        ({"region": "heterps-" + "0" * 32}, BAD),
        ({"sequence": 2**64 - 1}, BAD),
        ({"first": 2**63, "parts": 2**32 - 1}, BAD),
        ({"first": 1, "parts": 2**32 - 1}, BAD),
        ({"sequence": 9, "first": 2, "parts": 3}, BAD),
        ({"value": float("nan")}, BAD),
        ({"value": float("inf")}, BAD),
        ({"value": float("-inf"), "kind": "assign"}, BAD),
        ({"value": float("nan"), "kind": "add"}, BAD),
    ],
    ids=str,
)
def test_wrong_pushes(target: Target, fields: dict[str, Any], code: grpc.StatusCode) -> None:
    assert target.refused("Push", push_of(**fields)) == code


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("column", [0, 1])
def test_wrong_usage(target: Target, bad: float, column: int) -> None:
    usage = np.ones((2, 3), np.float32)
    usage[column, 1] = bad
    rows = np.concatenate([np.zeros(12, np.float32), usage.ravel()])
    assert target.refused("Push", push_of(usage=True, rows=rows)) == BAD


def test_a_refused_push_may_come_again_right(target: Target) -> None:
    """What was refused was not applied, so it does not count as applied."""
    name = {"client": "again", "sequence": 3}
    assert target.refused("Push", push_of(value=float("nan"), **name)) == BAD
    assert target.refused("Push", push_of(dim=0, count=9, **name)) == BAD
    reply = pb.PushReply.FromString(target.call("Push", push_of(**name)))
    assert reply.applied
    target.twins["plain"].push(KEYS[:3], np.ones((3, 4), np.float32))


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("CreateTable", pb.CreateTableRequest()),
        ("CreateTable", pb.CreateTableRequest(table=pb.TableSpec(name="x", dim=2**31))),
        ("CreateTable", pb.CreateTableRequest(table=pb.TableSpec(name="../x", dim=2))),
        ("CreateTable", pb.CreateTableRequest(table=pb.TableSpec(name="x", dim=4))),
        ("DropTables", pb.DropTablesRequest()),
        ("Shrink", pb.ShrinkRequest(table="none")),
        ("Keys", pb.KeysRequest(table="none")),
        ("Advance", pb.AdvanceRequest(group="g", worker=3, workers=2)),
        ("Advance", pb.AdvanceRequest(group="g", workers=2**31)),
        ("Save", pb.SaveRequest(directory="x", shards=0)),
        ("Save", pb.SaveRequest(directory="x", shard=5, shards=2)),
        ("Save", pb.SaveRequest(directory="x", shards=1, mode="copy")),
        ("Save", pb.SaveRequest(directory="x", shards=1, cut="of nobody")),
        ("Load", pb.LoadRequest(directory="/nowhere", shards=1)),
        ("Load", pb.LoadRequest(directory="x", shard=2, shards=1)),
        ("Route", pb.RouteRequest(install=pb.Routing(version=3, shards=["a:1"], bucket=[0]))),
        ("Move", pb.MoveRequest(to="nobody", buckets=[5000])),
        ("Replicate", pb.LogRecord(kind="push", of="nobody", number=7, payload=b"junk")),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(str(value)[:40]),
)
def test_wrong_control(target: Target, method: str, request_: Message) -> None:
    assert target.refused(method, request_) in REFUSALS


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 33, 200, 1000])
@pytest.mark.parametrize(
    "method",
    ["Pull", "Push", "Stage", "Tally", "Commit", "Keys", "Replicate", "Attach", "CreateTable",
     "DropTables", "Shrink", "Stats", "Advance", "Save", "Load", "Route", "Move", "Cut", "Nothing"],
)  # fmt: skip
def test_bytes_at_random(fuzzed: Target, method: str, size: int) -> None:
    rng = np.random.default_rng([size, len(method)])
    for _ in range(3):
        request = rng.bytes(size)
        with suppress(grpc.RpcError):
            fuzzed.call(method, request)
    fuzzed.check()


STEP: dict[str, Any] = {"series": "s", "step": 1}
PLAIN: dict[str, Any] = {"table": "plain", "dim": 4, "count": 3}
ROWS = np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("head", "payload"),
    [
        (pb.StageRequest(step=1), []),
        (pb.StageRequest(series="s" * 257), []),
        (pb.StageRequest(series="s", step=1 << 62), []),
        (pb.StageRequest(**STEP, slot=1 << 16), []),
        (pb.StageRequest(**STEP), [KEYS[:3]]),
        (pb.StageRequest(**STEP, covers=b"x"), []),
        (pb.StageRequest(**STEP, route=7), []),
        (pb.StageRequest(**STEP, region="heterps-" + "0" * 32), []),
        (pb.StageRequest(**STEP, tables=[PLAIN]), [KEYS[:3], ROWS[:2]]),
        (pb.StageRequest(**STEP, tables=[PLAIN | {"dim": 3}]), [KEYS[:3], ROWS[:, :3].copy()]),
        (pb.StageRequest(**STEP, tables=[PLAIN | {"dim": 0}]), [KEYS[:3]]),
        (pb.StageRequest(**STEP, tables=[PLAIN | {"dtype": "int8"}]), [KEYS[:3], ROWS]),
        (pb.StageRequest(**STEP, tables=[PLAIN | {"usage": True}]), [KEYS[:3], ROWS]),
        (
            pb.StageRequest(**STEP, tables=[PLAIN | {"usage": True}]),
            [KEYS[:3], ROWS, -ROWS.ravel()[:6]],
        ),
        (pb.StageRequest(**STEP, tables=[PLAIN | {"key_bytes": 3}]), [KEYS[:3], ROWS]),
        (pb.StageRequest(**STEP, tables=[PLAIN | {"count": 2**64 - 1}]), [KEYS[:3], ROWS]),
        (pb.StageRequest(**STEP, tables=[PLAIN, PLAIN]), [KEYS[:3], ROWS, KEYS[:3], ROWS]),
        (pb.StageRequest(**STEP, tables=[PLAIN | {"table": "none"}]), [KEYS[:3], ROWS]),
        (pb.TallyRequest(**STEP), []),
        (pb.TallyRequest(**STEP, slots=1), []),
        (pb.TallyRequest(series="s", step=2**64 - 1, slots=2**32 - 1), []),
        (pb.CommitRequest(**STEP, slots=1, scale=1, rate=1), []),
        (pb.CommitRequest(**STEP, slots=1, scale=float("nan"), rate=1, part={}), []),
        (pb.CommitRequest(**STEP, slots=1, scale=-1, rate=1, part={}), []),
        (pb.CommitRequest(**STEP, slots=1, scale=1, rate=float("inf"), part={}), []),
        (pb.CommitRequest(**STEP, slots=2, scale=1, rate=1, part={}), []),
        (pb.CommitRequest(**STEP, slots=1, scale=1, rate=1, part={"slot": 1}), []),
        (pb.CommitRequest(**STEP, slots=1, scale=1, rate=1), [KEYS[:3]]),
        (pb.CommitRequest(**STEP, slots=1, scale=1, rate=1, part={}, shrink=["none"]), []),
        (pb.CommitRequest(**STEP, drop=True, shrink=["none"]), []),
        (
            pb.CommitRequest(**STEP, slots=1, scale=1, rate=1, part={"tables": [PLAIN]}),
            [KEYS[:3], ROWS * np.float32(np.nan)],
        ),
        (
            pb.CommitRequest(**STEP, slots=1, scale=1e6, rate=1, part={"tables": [PLAIN]}),
            [KEYS[:3], ROWS * np.float32(3e38)],
        ),
    ],
    ids=str,
)
def test_wrong_steps(target: Target, head: Message, payload: list[Any]) -> None:
    method = type(head).__name__.removesuffix("Request")
    request = pack(head, *payload) if payload else head.SerializeToString()
    assert target.refused(method, request) in REFUSALS


def test_streams_of_nonsense(target: Target) -> None:
    absorb = target.channel.stream_unary(PATH + "Absorb")
    rng = np.random.default_rng(0)
    streams: list[list[bytes]] = [
        [],
        [rng.bytes(50)],
        [pb.StateBlock(name="plain", payload=rng.bytes(100)).SerializeToString()],
        [pb.StateBlock(token="t", name="plain", payload=b"HPB2" + bytes(60)).SerializeToString()],
        [pb.StateBlock(token="t", of="me", last=True).SerializeToString()],
        [pb.StateBlock(token="t", name="none", payload=b"x").SerializeToString()],
    ]
    for stream in streams:
        with pytest.raises(grpc.RpcError):
            absorb(iter(stream), timeout=20)


@pytest.mark.parametrize("method", ["Absorb", "Load", "Cut"])
def test_calls_that_cannot_be_parsed_are_ended(target: Target, method: str) -> None:
    """More of them than a connection may have at once: none is held."""
    for _ in range(150):
        assert target.refused(method, b"\xff") == BAD


def mutate(rng: np.random.Generator, request: bytes, others: list[bytes]) -> bytes:
    """A few flipped, cut, doubled or foreign bytes, mostly near the head."""
    data = bytearray(request)
    for _ in range(int(rng.integers(1, 4))):
        near = len(data) if rng.random() < 0.3 else min(len(data), 60)
        at, kind = int(rng.integers(0, max(1, near))), rng.integers(0, 6)
        if kind <= 2 and data:
            data[at] = int(rng.integers(0, 256)) if kind else data[at] ^ 1 << int(rng.integers(8))
        elif kind == 3:
            del data[at : at + int(rng.integers(1, 9))]
        elif kind == 4:
            data[at:at] = data[at : at + int(rng.integers(1, 20))]
        else:
            other = others[int(rng.integers(len(others)))]
            begin = int(rng.integers(0, len(other)))
            data[at:at] = other[begin : begin + int(rng.integers(1, 20))]
    return bytes(data)


def test_mutated_pulls_read_what_they_ask_for(target: Target) -> None:
    rng = np.random.default_rng(1)
    small = KEYS[:5].astype("<u4")
    valid = [
        pull_of(),
        pull_of(200, read_only=True),
        pack(pb.PullRequest(table="logged", dim=3, count=5, key_bytes=4), small),
        pull_of(dtype="float16"),
        pack(pb.PullRequest(table="plain", dim=4, count=5, key_bytes=4, dtype="bfloat16"), small),
        pull_of(prefetch=True),
    ]
    answered = 0
    for i in range(400):
        request = mutate(rng, valid[i % len(valid)], valid) if i >= len(valid) else valid[i]
        try:
            reply = pb.PullReply.FromString(target.call("Pull", request))
        except grpc.RpcError as error:
            assert error.code() in REFUSALS, error  # type: ignore[attr-defined]  # noqa: PT017
            continue
        answered += 1
        asked = pb.PullRequest.FromString(request)
        assert (reply.dim, reply.count) == (asked.dim, asked.count)
        if asked.prefetch:
            assert not reply.payload
            continue
        keys = np.frombuffer(asked.payload, f"<u{asked.key_bytes or 8}").astype(np.uint64)
        twin = target.twins[asked.table]
        assert (len(keys), twin.dim) == (asked.count, asked.dim)
        expected = torch.from_numpy(twin.pull(keys))
        if asked.dtype in ("float16", "bfloat16"):
            expected = expected.to(getattr(torch, asked.dtype)).view(torch.int16)
        assert reply.payload == expected.numpy().tobytes()
    assert 40 < answered < 300


def apply(target: Target, request: bytes) -> None:
    """To the twin, as plain protobuf and NumPy read the message."""
    head = pb.PushRequest.FromString(request)
    twin = target.twins[head.table]
    assert head.dim == twin.dim
    body, n = head.payload, head.count
    size = head.key_bytes or 8
    keys = np.frombuffer(body[: n * size], f"<u{size}").astype(np.uint64)
    width = 2 if head.dtype in ("float16", "bfloat16") else 4
    raw = body[n * size : n * size + n * head.dim * width]
    if width == 4:
        values = np.frombuffer(raw, "<f4")
    else:
        halves = torch.from_numpy(np.frombuffer(raw, "<i2").copy())
        values = halves.view(getattr(torch, head.dtype)).float().numpy()
    assert len(body) == n * (size + head.dim * width + (8 if head.usage else 0))
    rate = head.rate if head.HasField("rate") else 1.0
    twin.push(keys, values.reshape(n, head.dim), kind=head.kind, rate=rate)


def test_mutated_pushes_do_what_they_say(target: Target) -> None:
    rng = np.random.default_rng(2)
    # Multiples of a quarter: they survive every dtype, and sums of any order.
    rows = (rng.integers(-20, 20, (5, 4)) / 4).astype(np.float32)
    small = KEYS[:5].astype("<u4")
    halves = {
        name: torch.from_numpy(rows).to(dtype).view(torch.int16).numpy()
        for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16))
    }
    applied = refused = 0
    for i in range(600):
        common: dict[str, Any] = {
            "client": f"m{i}", "epoch": 1, "sequence": 1, "count": 5, "first": 1, "parts": 1,
        }  # fmt: skip
        plain = common | {"table": "plain", "dim": 4}
        logged = common | {"table": "logged", "dim": 3}
        valid = [
            pack(pb.PushRequest(**plain, key_bytes=4), small, rows),
            pack(pb.PushRequest(**plain, rate=0.5, step=9), KEYS[-5:], rows),
            pack(pb.PushRequest(**plain, kind="add", dtype="float16"), KEYS[:5], halves["float16"]),
            pack(
                pb.PushRequest(**plain, kind="assign", dtype="bfloat16", key_bytes=4),
                small,
                halves["bfloat16"],
            ),
            pack(
                pb.PushRequest(**logged, position="p"),
                KEYS[3:8],
                rows[:, 1:],
            ),
            pack(pb.PushRequest(**plain, usage=True), KEYS[5:10], rows, np.ones(10, np.float32)),
        ]
        request = valid[i % len(valid)]
        if i >= len(valid):
            request = mutate(rng, request, valid)
        try:
            reply = pb.PushReply.FromString(target.call("Push", request))
        except grpc.RpcError as error:
            assert error.code() in REFUSALS, error  # type: ignore[attr-defined]  # noqa: PT017
            refused += 1
            continue
        if reply.applied:
            applied += 1
            apply(target, request)
        if i % 60 == 0:
            target.check()
    assert applied > 60
    assert refused > 200


def test_mutated_control_leaves_the_tables(target: Target) -> None:
    rng = np.random.default_rng(3)
    spec = target.client.spec("logged")
    valid: list[tuple[str, Message]] = [
        ("CreateTable", pb.CreateTableRequest(table=spec)),
        ("Keys", pb.KeysRequest(table="plain", limit=10)),
        ("Shrink", pb.ShrinkRequest(table="plain", step=7, decay=True)),
        ("Stats", pb.StatsRequest()),
        ("Attach", pb.AttachRequest()),
        ("Load", pb.LoadRequest(directory="nowhere", shards=1)),
        ("Replicate", pb.LogRecord(kind="drop", of="x", number=2, payload=b"plain")),
    ]
    everything = [message.SerializeToString() or b"\0" for _, message in valid]
    for i in range(350):
        method, message = valid[i % len(valid)]
        with suppress(grpc.RpcError):
            target.call(method, mutate(rng, message.SerializeToString(), everything))


def test_a_save_still_ends(target: Target, tmp_path: Path) -> None:
    """Half a push, of a sender that is never heard again, holds nobody up for long."""
    half = push_of(value=0.0, client="half", sequence=2, first=1, parts=3)
    assert pb.PushReply.FromString(target.call("Push", half)).applied
    target.client.save(tmp_path / "ck", timeout_s=20)
    rows = LocalTable.load_checkpoint(tmp_path / "ck")["plain"].pull(KEYS)
    np.testing.assert_array_equal(rows, target.twins["plain"].pull(KEYS))


# Shared memory.


@pytest.fixture
def region(target: Target) -> Iterator[Region]:
    made = Region(4096)
    told = pb.AttachReply.FromString(target.call("Attach", b""))
    line = UnixLine(told.socket, told.secret, made)
    yield made
    line.close()


@pytest.mark.parametrize(
    ("keys_at", "rows_at", "count"),
    [(4090, 0, 3), (0, 4080, 3), (2**63, 0, 3), (0, 2**64 - 8, 3), (0, 0, 600), (0, 64, 2**60)],
)
def test_what_lies_beyond_a_region(
    target: Target, region: Region, keys_at: int, rows_at: int, count: int
) -> None:
    head = pb.PullRequest(
        table="plain", dim=4, count=count, region=region.name, keys_at=keys_at, rows_at=rows_at
    )
    assert target.refused("Pull", head) == BAD
    push = pb.PushRequest(
        table="plain", dim=4, count=count, client="r", epoch=1, sequence=1,
        region=region.name, region_at=max(keys_at, rows_at),
    )  # fmt: skip
    if count == 3 or count * 24 > 4096:
        assert target.refused("Push", push) == BAD
    assert bytes(region.view(0, 4096)) == bytes(4096)


def test_a_region_is_used_where_it_should_be(target: Target, region: Region) -> None:
    region.view(8, 24)[:] = KEYS[:3].tobytes()
    head = pb.PullRequest(table="plain", dim=4, count=3, region=region.name, keys_at=8, rows_at=40)
    reply = pb.PullReply.FromString(target.call("Pull", head.SerializeToString()))
    assert (reply.count, reply.payload) == (3, b"")
    rows = target.twins["plain"].pull(KEYS[:3])
    assert bytes(region.view(40, 48)) == rows.tobytes()
    assert not any(region.view(88, 4096 - 88))
    # What a push finds there is checked as well.
    region.view(100, 24)[:] = KEYS[:3].tobytes()
    region.view(124, 48)[:] = np.full(12, np.nan, np.float32).tobytes()
    push = pb.PushRequest(
        table="plain", dim=4, count=3, client="r", epoch=1, sequence=1,
        region=region.name, region_at=100,
    )  # fmt: skip
    assert target.refused("Push", push) == BAD
    # Rows that overwrite the keys they were asked by.
    head.rows_at = 8
    target.call("Pull", head.SerializeToString())
    assert bytes(region.view(8, 48)) == rows.tobytes()


@pytest.mark.parametrize(
    ("shards_at", "shard"), [(4090, 0), (2**63, 0), (2**64 - 8, 1), (0, 1024), (0, 2**32 - 1)]
)
def test_a_map_of_shards_that_is_none(
    target: Target, region: Region, shards_at: int, shard: int
) -> None:
    head = pb.PullRequest(
        table="plain", dim=4, count=3, region=region.name, keys_at=8, rows_at=40,
        shared_out=True, shards_at=shards_at, shard=shard,
    )  # fmt: skip
    assert target.refused("Pull", head) == BAD


def test_keys_of_other_shards_are_left_alone(target: Target, region: Region) -> None:
    size = 2048
    region.view(0, 4096)[:] = bytes(4096)
    region.view(size, 24)[:] = KEYS[:3].tobytes()
    route = np.zeros(1024, np.uint16)
    route[_native.buckets_of(KEYS[1:2])] = 7
    region.view(0, size)[:] = route.tobytes()
    rows = target.twins["plain"].pull(KEYS[:3]).copy()
    for shard, mine in ((0, [0, 2]), (7, [1]), (9, [])):
        region.view(size + 40, 48)[:] = bytes(48)
        head = pb.PullRequest(
            table="plain", dim=4, count=3, region=region.name, keys_at=size, rows_at=size + 40,
            shared_out=True, shards_at=0, shard=shard,
        )  # fmt: skip
        target.call("Pull", head.SerializeToString())
        found = np.frombuffer(region.view(size + 40, 48), np.float32).reshape(3, 4)
        expected = np.zeros_like(rows)
        expected[mine] = rows[mine]
        np.testing.assert_array_equal(found, expected)


def _file(size: int, seals: int, flags: int = os.MFD_ALLOW_SEALING) -> int:
    file = os.memfd_create("made here", flags)
    os.ftruncate(file, size)
    if seals:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: _file(4096, 0), "unsealed"),
        (lambda: _file(4096, fcntl.F_SEAL_GROW), "sealed otherwise"),
        (lambda: _file(4096, 0, 0), "cannot be sealed"),
        (lambda: _file(0, fcntl.F_SEAL_SHRINK), "empty"),
        (lambda: _file(MOST_BYTES + 1, fcntl.F_SEAL_SHRINK), "too large"),
        (lambda: _file(4096, fcntl.F_SEAL_SHRINK), ""),
        (lambda: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR), "a file"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "a device"),
        (lambda: os.pipe()[0], "a pipe"),
        (lambda: socket.socket().detach(), "a socket"),
    ],
)
def test_memory_that_its_owner_could_take_away_is_not_mapped(
    target: Target, make: Callable[[], int], name: str
) -> None:
    """To read what was cut off a mapped file would kill the shard."""
    told = pb.AttachReply.FromString(target.call("Attach", b""))
    file = make()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect("\0" + told.socket)
        socket.send_fds(connection, [told.secret, name.encode()], [file])
        assert connection.recv(10) == b""
    with suppress(OSError):
        os.ftruncate(file, 0)
    os.close(file)
    target.check()


def test_a_region_cannot_be_shrunk(target: Target, region: Region) -> None:
    """Nor does a hole that its owner makes harm the shard: it reads zeros."""
    region.view(8, 24)[:] = KEYS[:3].tobytes()
    head = pb.PullRequest(table="plain", dim=4, count=3, region=region.name, keys_at=8, rows_at=40)
    with pytest.raises(PermissionError):
        os.ftruncate(region.file, 16)
    region._map.madvise(mmap.MADV_REMOVE)
    target.call("Pull", head.SerializeToString())
    rows = target.twins["plain"].pull(np.zeros(3, np.uint64))
    assert bytes(region.view(40, 48)) == rows.tobytes()
    target.check()


def test_the_shard_is_no_http_server(target: Target) -> None:
    """Bytes that are no gRPC at all end their connection and nothing else."""
    host, _, port = target.shards.addresses[0].rpartition(":")
    rng = np.random.default_rng(5)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", rng.bytes(1000), struct.pack("<Q", 2**63) * 50):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.settimeout(10)
            with suppress(OSError):
                connection.sendall(junk)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass


def test_the_reader_of_messages_agrees_with_protobuf() -> None:
    """It finds the payload where protobuf would, or refuses."""
    from protos.codec import unpack

    rng = np.random.default_rng(6)
    valid = [push_of(), pull_of(), push_of(rate=1.0, usage=True, region="r")]
    same = 0
    for i in range(2000):
        data = mutate(rng, valid[i % 3], valid)
        try:
            head, payload = unpack(pb.PushRequest, data)
        except DecodeError:
            continue
        expected = pb.PushRequest.FromString(data)
        assert bytes(payload) == expected.payload
        expected.ClearField("payload")
        head.ClearField("payload")
        assert head == expected
        same += 1
    assert same > 200
