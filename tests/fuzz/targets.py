"""What parses bytes that somebody else wrote: each parser with the errors that it documents.

A target's `seeds` are made by the code that writes such bytes. Its `open` gives the parser, a
function of bytes that returns, or raises one of `refusals`; whatever else it raises, and whatever
takes too long or too much memory, is a finding.
"""

import hashlib
import importlib
import itertools
import json
import mmap
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

Parser = Callable[[bytes], object]
ROOT = Path(__file__).parents[2]
SLOWEST = 10  # s of a processor for one input
_MEMORY = 1 << 30  # bytes that one input may take above what was taken before
_RENEWED = 500  # inputs after which a target with a state of its own begins anew


@dataclass(frozen=True, slots=True)
class Target:
    """A parser.

    Attributes:
        open: the parser, given a folder to write to.
        seeds: inputs that it takes, given a folder to write to.
        refusals: dotted names of the errors that it documents.
        modules: whose branches are counted, dotted names with all below them.
    """

    open: Callable[[Path], Parser]
    seeds: Callable[[Path], list[bytes]]
    refusals: tuple[str, ...]
    modules: tuple[str, ...]


def refusals(target: Target) -> tuple[type[Exception], ...]:
    """The errors that a target documents."""
    named = (name.rpartition(".") for name in target.refusals)
    return tuple(getattr(importlib.import_module(module), name) for module, _, name in named)


def bound_memory() -> None:
    """Have an input that takes much more than what is taken now end in a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


# What a text can be made of that no writer of ours makes.
EXTREMES = [
    b"",
    b"\xff\xfe",
    b"null",
    b"{}",
    b"[" * 2000,
    b'{"a":' * 2000,
    b"- " * 2000,
    b"? " * 2000,
    b"layers: &a [*a]",
    b"<<: 1",
    b"? [a]\n: b",
    b"name: !!timestamp z",
    b"name: !!bool z",
    b"name: !!int ''",
    b"samples: 0x" + b"f" * 9000,
    b'{"name": "n", "layers": [1], "reference_batch": 1, "samples": 1' + b"0" * 400 + b"}",
    # Nine to the seventh values, told in 400 bytes.
    b"layers: [" + b", ".join(
        b"&%c [%s]" % (name, b", ".join([b"*%c" % (name - 1)] * 9 if name > 97 else [b"x"] * 9))
        for name in range(97, 105)
    ) + b"]",
]  # fmt: skip


def _texts(*names: str) -> list[bytes]:
    return [(ROOT / "examples" / name).read_bytes() for name in names]


# Files of a planner: an input that begins with a brace is read as JSON, else as YAML.


def _file(folder: Path, stem: str, data: bytes) -> Path:
    path = folder / f"{stem}.{'json' if data.startswith(b'{') else 'yaml'}"
    path.write_bytes(data)
    return path


def _workload(folder: Path) -> Parser:
    from scheduler import load_workload

    return lambda data: load_workload(_file(folder, "workload", data))


def _workloads(folder: Path) -> list[bytes]:
    from scheduler import load_workload

    made = load_workload(ROOT / "examples/plan/workload.yaml").to_json()
    small = made | {"layers": made["layers"][:2], "staleness": 1, "batch": 64}
    # An anchor and two aliases, of which mutations may make many.
    shared = b"layers: [{name: l, kind: k, cost: &c {cpu: *d}}, *c, *c]\nname: &d x\n"
    return [yaml.safe_dump(small).encode(), json.dumps(small).encode(), shared, *EXTREMES]


def _resources(folder: Path) -> Parser:
    from heterps.job.resources import load_resources

    return lambda data: load_resources(_file(folder, "resources", data))


def _decision(folder: Path) -> Parser:
    from scheduler.decision.record import Decision

    return lambda data: Decision.load(_file(folder, "decision", data)).to_message()


def _decisions(folder: Path) -> list[bytes]:
    from scheduler import load_resources, load_workload, plan
    from scheduler.problem.workload import Workload

    whole = load_workload(ROOT / "examples/plan/workload.yaml").to_json()
    work = Workload.parse(whole | {"layers": whole["layers"][:3]})
    types = load_resources(ROOT / "examples/plan/resources.yaml")
    found = []
    for number, (floor, method) in enumerate([(1000.0, "ppo"), (0.0, "exact"), (1e12, "greedy")]):
        path = folder / f"{number}.json"
        plan(work, types, min_throughput=floor, method=method).export(path)
        found.append(path.read_bytes())
    return [*found, *EXTREMES]


# Job files: what follows a zero byte are values for --set, one a line.


def _job(folder: Path) -> Parser:
    from heterps.job.file import load_job

    for name in ("model.py", "prepare.py", "resources.yaml"):
        (folder / name).write_bytes((ROOT / "examples/flights" / name).read_bytes())
    path = folder / "job.yaml"

    def parse(data: bytes) -> object:
        text, _, assignments = data.partition(b"\0")
        path.write_bytes(text)
        return load_job(path, assignments.decode(errors="surrogateescape").splitlines())

    return parse


def _jobs(folder: Path) -> list[bytes]:
    flights, moe, paper = _texts("flights/job.yaml", "moe_lm/job.yaml", "heterps_paper/nce.yaml")
    chosen = flights + b"\0train.epochs=3\ndata.dense=[a, b]\nname=x"
    nested = b"model: {args: {%s}}" % EXTREMES[-1]
    return [flights, moe, paper, chosen, nested, *EXTREMES]


# Saves: an input is one file of a save whose manifest names it with its size and checksum.


def _manifest(folder: Path) -> Parser:
    from ps.checkpoint import manifest, sealed
    from ps.checkpoint.tables import read_checkpoint

    def parse(data: bytes) -> object:
        """A manifest; one after an exclamation mark is given its checksum."""
        if data.startswith(b"!"):
            body = data[1:].rpartition(sealed._CHECKSUM)[0] or data[1:]
            digest = sealed.digest_of(body + sealed._END).encode()
            data = body + sealed._CHECKSUM + digest + b'"' + sealed._END
        (folder / manifest.MANIFEST).write_bytes(data)
        return read_checkpoint(folder)

    return parse


def _saved(folder: Path) -> Path:
    """A save of two tables, with a client's window."""
    import numpy as np

    from ps.local.table import LocalTable

    table = LocalTable.create("rows", 3, optimizer="adagrad", learning_rate=0.1, seed=1)
    table.push(np.arange(5), np.ones((5, 3), np.float32))
    table.save(folder / "save")
    return folder / "save"


def _manifests(folder: Path) -> list[bytes]:
    from tests.ps.checkpoint.manifests import sealed

    whole = json.loads((_saved(folder) / "manifest.json").read_text())
    parent = {"place": "../a", "id": whole["id"]}
    delta = whole | {"mode": "delta", "parent": parent, "route": [0] * 1024}
    old = {name: value for name, value in delta.items() if name != "sha256"} | {"version": 2}
    right = [sealed(whole), sealed(delta)]
    return [*right, *(b"!" + data for data in right), json.dumps(old).encode(), *EXTREMES]


def _rows(folder: Path) -> Parser:
    from ps.checkpoint.manifest import File, Manifest
    from ps.checkpoint.places import open_store
    from ps.checkpoint.tables import load_tables

    store = open_store(folder)
    place = "save-000000000000001-00000000"
    (folder / place).mkdir()

    def parse(data: bytes) -> object:
        """Files of a save, the first byte of one saying which: rows of a table, or a window."""
        table, content = ("rows", data[1:]) if data[:1] == b"r" else ("", data[1:])
        name = f"{place}/shard-00000-of-00001.{table or 'window'}"
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        rows = int.from_bytes(content[-8:], "little")
        file = File(name, 0, table, rows, len(content), digest)
        manifest = Manifest(place, "checkpoint", 1, (file,), {})
        tables, applied = load_tables([(store, manifest)])
        for each in tables.values():
            each.native.keys(10)
        return applied

    return parse


def _row_files(folder: Path) -> list[bytes]:
    import base64

    from ps.engine import _native

    saved = _saved(folder)
    rows = [b"r" + path.read_bytes() for path in saved.glob("*/*.rows")]
    bits = base64.b64encode(bytes(_native.WINDOW // 8)).decode()
    window = {"clients": [["me", 1, 7, bits]], "series": []}
    return [*rows, b"w" + json.dumps(window).encode()]


# Logs: the first byte says whether what follows is a file, or frames whose checksums are right, as
# no fuzzer finds its way through one: of bodies, or heads that say anything.


def _log(folder: Path) -> Parser:
    import struct
    from zlib import crc32

    from ps.shard import logfile

    path = folder / logfile.name_of(1)
    head = struct.Struct("<QQ")
    salt = 7

    def parse(data: bytes) -> object:
        kind, whole = data[:1], data[1:]
        if kind != b"l":
            body = whole if kind == b"b" else whole[head.size :]
            at = logfile.HEADER_BYTES
            size, safe = len(body), at
            if kind != b"b" and len(whole) >= head.size:
                size, safe = head.unpack_from(whole)
            whole = logfile.Header(1, 0, salt).pack()
            whole += logfile.pack_head(salt, at, safe, size, crc32(body))
            whole += body + bytes(logfile.padding_of(len(body)))
            whole += logfile.pack_head(salt, len(whole), at)
        path.write_bytes(whole)
        file = logfile.LogFile(path, 1)
        for end in (None, len(whole)):
            try:
                for _, payload in file.records(end):
                    len(payload)
            except logfile.DamagedFileError:
                file.lost()
        return file.good

    return parse


def _logs(folder: Path) -> list[bytes]:
    from protos.codec import pack
    from protos.parameter_server_pb2 import LogRecord
    from ps.shard import logfile
    from ps.shard.log import Log

    log = Log(folder, 1)
    log.append("push", 7, b"first")
    log.append("drop", 8, b"rows")
    log.close()
    whole = (folder / logfile.name_of(1)).read_bytes()
    record = pack(LogRecord(kind="push", time_s=3, of="me", number=4), b"payload")
    heads = (len(record).to_bytes(8, "little") + bytes(8), b"\xff" * 16)
    return [
        *(b"l" + whole, b"l" + whole[:-3], b"l" + whole[:60] + whole[70:]),
        *(b"b" + record, *(b"h" + head + record for head in heads)),
    ]


# Frames: of the stages, and the messages that a shard takes over gRPC and the Unix socket.


def _frame(folder: Path) -> Parser:
    from protos import stage_pb2
    from protos.codec import unpack
    from workers.links.frames import Frame

    return lambda data: Frame.unpack(*unpack(stage_pb2.Frame, data))


def _frames(folder: Path) -> list[bytes]:
    import torch

    from protos.codec import payload_tag
    from workers.links.frames import BACKWARD, FORWARD, Frame, FrameId

    tensors = {
        "x": torch.ones(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "ids": torch.arange(4),
        "none": torch.ones(0, 2),
        "one": torch.tensor(True),
    }
    ids = [FrameId(kind, "train", 5, 1) for kind in (FORWARD, BACKWARD)]
    parts = [Frame(one, tensors, frozenset(["x"])).parts(2) for one in ids]
    return [
        b"".join((head, payload_tag(sum(map(len, payload))), *payload)) for head, payload in parts
    ]


def _ring(folder: Path) -> Parser:
    """What the worker before sends: the first byte is this worker's rank, of three."""
    import socket
    import threading

    import torch

    from workers.errors import PeerLostError
    from workers.links.inbox import Stopped
    from workers.links.ring import BucketId, Ring, Section, SumError

    broken: list[threading.ExceptHookArgs] = []
    threading.excepthook = broken.append
    values = torch.arange(6.0).view(torch.uint8)
    sections = [Section(torch.float32, 24)]

    def parse(data: bytes) -> object:
        (theirs, before), (after, next_) = socket.socketpair(), socket.socketpair()
        with theirs, next_:
            ring = Ring(data[0] % 3 if data else 0, 3, before, after, lambda: False)
            buckets = [
                ring.begin(BucketId(1, number), values.clone(), sections, last=number == 1)
                for number in range(2)
            ]
            theirs.sendall(data[1:])
            theirs.shutdown(socket.SHUT_WR)
            ring._receiver.join(SLOWEST)
            alive = ring._receiver.is_alive()
            for bucket in buckets:
                try:
                    ring.wait(bucket)
                except (PeerLostError, SumError, Stopped):
                    continue
            ring.close()
        assert not alive, "it waits for more though the connection has ended"
        assert not broken, broken
        return None

    return parse


def _ring_messages(folder: Path) -> list[bytes]:
    import torch

    from workers.links import ring
    from workers.links.ring import BucketId, Section

    payload = torch.arange(6.0).view(torch.uint8)

    def message(kind: int, number: int) -> bytes:
        shape = ring._Shape((Section(torch.float32, 24),), number == 1)
        head = ring._Message(kind, BucketId(1, number), shape, 0, payload).head()
        return head + payload.numpy().tobytes()

    alive = ring._word(ring._ALIVE).head()
    leave = [ring._word(ring._LEAVE, rank).head() for rank in range(3)]
    first = [message(kind, 0) for kind in (ring._PART, ring._SUM)]
    second = [message(kind, 1) for kind in (ring._PART, ring._SUM)]
    found = []
    for rank in range(3):
        found.append(bytes([rank]) + b"".join([alive, *first, *second, *leave]))
        found.append(bytes([rank]) + b"".join([*second, first[1]]))
        found.append(bytes([rank]) + first[0] + leave[(rank - 1) % 3])
    return found


def _state(folder: Path) -> Any:
    """A shard's, with two tables."""
    from ps.shard.state import ShardState
    from ps.table.spec import make_spec

    state = ShardState(str(folder))
    for name, dim in (("rows", 3), ("wide", 5)):
        state.create(make_spec(name, dim, optimizer="sgd", learning_rate=0.1), journal=False)
    return state


def _survive() -> None:
    """Have an error raised where a shard would end itself: its own fault, never a caller's."""

    def ended(reason: str, *_: object) -> NoReturn:
        raise AssertionError(f"the shard ended itself: {reason}")

    for name, module in list(sys.modules.items()):
        if name.startswith("ps.") and hasattr(module, "end_process"):
            module.end_process = ended  # type: ignore[attr-defined]


def _shard(folder: Path, regions: "dict[str, mmap.mmap] | None" = None) -> Parser:
    """One message on a shard's Unix socket; the first byte is the method.

    Args:
        regions: memory that is shared with it, by name.
    """
    import socket

    import grpc

    from ps.server.service import ParameterService

    _survive()
    mine, _theirs = socket.socketpair()
    faults = {code.value[0] for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)}

    def begun() -> ParameterService:
        made = ParameterService(_state(folder))
        made.data.regions._maps.update(regions or {})
        return made

    served, inputs = begun(), itertools.count(1)

    def parse(data: bytes) -> object:
        nonlocal served
        if next(inputs) % _RENEWED == 0:
            served = begun()
        reply = served.unix._answer(data or b"\0", mine)
        assert reply[0] not in faults, reply[1:]
        assert _theirs.fileno() >= 0  # kept open: the client waits
        return reply

    return parse


def _calls(folder: Path) -> list[bytes]:
    import numpy as np

    from protos import parameter_server_pb2 as pb
    from protos.codec import pack

    keys, rows = np.arange(2, dtype=np.uint64), np.ones((2, 3), np.float32)
    table = {"table": "rows", "dim": 3, "count": 2}
    step: dict[str, Any] = {"series": "s", "step": 1}
    named = {"client": "me", "epoch": 1, "sequence": 1}
    return [
        b"\0" + pack(pb.PullRequest(**table), keys),
        b"\0" + pack(pb.PullRequest(**table, dtype="float16", key_bytes=4), keys.astype("<u4")),
        b"\1" + pack(pb.PushRequest(**table, **named), keys, rows),
        b"\1" + pack(pb.PushRequest(**table, **named, kind="assign", rate=1.0), keys, rows),
        b"\2" + pack(pb.StageRequest(**step, tables=[table]), keys, rows),
        b"\2" + pack(pb.StageRequest(**step, tables=[table | {"usage": True}]), keys, rows, rows),
        b"\3" + pb.TallyRequest(**step, slots=1).SerializeToString(),
        b"\4" + pb.CommitRequest(**step, slots=1, scale=1, rate=1).SerializeToString(),
        b"\4"
        + pack(
            pb.CommitRequest(**step, slots=1, scale=1, rate=1, part={"tables": [table]}), keys, rows
        ),
    ]


# The same with memory that the client shares: two bytes say how long the message is, and what
# follows the message the memory holds.

_REGION, _REGION_BYTES = "r", 1 << 14


def _region(folder: Path) -> Parser:
    memory = mmap.mmap(-1, _REGION_BYTES)
    answer = _shard(folder, {_REGION: memory})

    def parse(data: bytes) -> object:
        end = 2 + int.from_bytes(data[:2], "little")
        content = data[end:][:_REGION_BYTES]
        memory[: len(content)] = content
        return answer(data[2:end])

    return parse


def _calls_by_region(folder: Path) -> list[bytes]:
    import numpy as np

    from protos import parameter_server_pb2 as pb
    from protos.codec import unpack
    from ps.table.buckets import default_route

    types = (pb.PullRequest, pb.PushRequest, pb.StageRequest, pb.TallyRequest, pb.CommitRequest)
    found = []
    for call in _calls(folder):
        head, payload = unpack(types[call[0]], call[1:])
        memory = bytearray(bytes(payload).ljust(4096, b"\0"))
        if isinstance(head, pb.TallyRequest):
            continue
        head.region = _REGION
        if isinstance(head, pb.PullRequest):
            head.rows_at, head.shared_out, head.shards_at = 128, True, 256
            memory[256 : 256 + 2048] = default_route(2).astype(np.uint16).tobytes()
        message = call[:1] + head.SerializeToString()
        found.append(len(message).to_bytes(2, "little") + message + bytes(memory[:2400]))
    return found


# Records of a log or of a primary, repeated; the first byte is the kind.

_KINDS = ("push", "stage", "commit", "create", "drop", "shrink", "absorb", "route", "state", "none")


def _replay(folder: Path) -> Parser:
    from protos.parameter_server_pb2 import LogRecord
    from ps.shard.replay import replay

    def parse(data: bytes) -> object:
        state = _state(folder)
        kind = _KINDS[data[0] % len(_KINDS)] if data else ""
        replay(state, LogRecord(kind=kind, time_s=5), memoryview(data)[1:])
        return state.summary(windows=True)

    return parse


def _records(folder: Path) -> list[bytes]:
    from protos import parameter_server_pb2 as pb
    from ps.table.buckets import default_route
    from ps.table.spec import make_spec

    calls = _calls(folder)
    state = _state(folder)
    routing = pb.Routing(version=1, shards=["a:1"], bucket=default_route(1).tolist())
    snapshot = state.tables["rows"].native.snapshot(
        since=0, values=False, min_score=0.0, buckets=None
    )
    block = snapshot.next() or b""
    snapshot.close()
    messages = {
        "create": pb.TableSpec.SerializeToString(make_spec("new", 2)),
        "drop": b"rows",
        "shrink": pb.ShrinkRequest(table="rows", step=1).SerializeToString(),
        "absorb": pb.StateBlock(name="rows", payload=block).SerializeToString(),
        "route": pb.RouteRequest(install=routing).SerializeToString(),
        "state": state.summary(windows=True).SerializeToString(),
    }
    named = [bytes([_KINDS.index(kind)]) + message for kind, message in messages.items()]
    return [b"\0" + calls[2][1:], b"\1" + calls[4][1:], b"\2" + calls[7][1:], *named]


# What else arrives from elsewhere: a job's code, a feed of weights, a policy.


def _archive(folder: Path) -> Parser:
    import shutil

    from workers.model.code.unpack import Limits, unpack

    limits = Limits(most_bytes=1 << 16, files=20, path_bytes=60, depth=5)

    def parse(data: bytes) -> object:
        import gzip

        # Compressed here, as no fuzzer finds its way through a checksum; else as it comes.
        packed = data[1:] if data[:1] == b"z" else gzip.compress(data[1:], 0, mtime=0)
        (folder / "code.tar.gz").write_bytes(packed)
        to = folder / "inner" / "code"
        try:
            unpack(folder / "code.tar.gz", to, limits)
        finally:
            shutil.rmtree(to, ignore_errors=True)
            assert sorted(p.name for p in folder.iterdir()) in (
                ["code.tar.gz"],
                ["code.tar.gz", "inner"],
            ), "something was written outside"
        return None

    return parse


def _archives(folder: Path) -> list[bytes]:
    import io
    import tarfile

    found = []
    for form in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
            for name in ("a.py", "deep/b.txt", "ü" * 20):
                member = tarfile.TarInfo(name)
                member.size = 5
                archive.addfile(member, io.BytesIO(b"hello"))
        found.append(b"t" + buffer.getvalue()[: 2560 * 2])
    return found


def _feed(folder: Path) -> Parser:
    from ps.checkpoint.places import open_store
    from ps.serving import feed

    feed._PAUSE_S = 0.0
    store = open_store(folder)

    def parse(data: bytes) -> object:
        (folder / feed.LATEST).write_bytes(data)
        return feed.read_feed(store)

    return parse


def _feeds(folder: Path) -> list[bytes]:
    from dataclasses import asdict

    from ps.serving.feed import FORMAT, VERSION, Entry, Feed, new_name

    bases = (Entry(new_name("base", 1), "save-1", 1),)
    deltas = (Entry(new_name("delta", 2), "save-2", 2),)
    tree = {"format": FORMAT, "version": VERSION, **asdict(Feed("main", bases, deltas, 7.0))}
    return [json.dumps(tree).encode(), *EXTREMES]


def _policy(folder: Path) -> Parser:
    from scheduler.agent.policy import load

    def parse(data: bytes) -> object:
        path = folder / "policy.safetensors"
        path.write_bytes(data)
        return load(path)

    return parse


def _policies(folder: Path) -> list[bytes]:
    import numpy as np
    from safetensors.numpy import save

    config = json.dumps({"distances": [1], "heads": 1, "blocks": 1})
    tiny = {"score.weight": np.zeros((1, 4), np.float32), "score.bias": np.zeros(1, np.float32)}
    return [save(tiny, {"config": config, "version": "tiny"})]


_SCHEDULER = ("scheduler.problem", "scheduler.decision")
_INPUT = ("scheduler.problem.fields.InputError",)
_SAVE = ("ps.errors.CheckpointError",)
TARGETS = {
    "workload": Target(_workload, _workloads, _INPUT, _SCHEDULER),
    "resources": Target(
        _resources,
        lambda _: [*_texts("plan/resources.yaml", "flights/resources.yaml"), *EXTREMES],
        _INPUT,
        (*_SCHEDULER, "heterps.job"),
    ),
    "decision": Target(_decision, _decisions, _INPUT, _SCHEDULER),
    "job": Target(_job, _jobs, ("heterps.job.file.JobFileError",), ("heterps.job",)),
    "manifest": Target(_manifest, _manifests, _SAVE, ("ps.checkpoint",)),
    "rows": Target(_rows, _row_files, _SAVE, ("ps.checkpoint", "ps.table")),
    "log": Target(
        _log,
        _logs,
        ("ps.shard.logfile.DamagedFileError",),
        ("ps.shard.logfile", "protos.codec"),
    ),
    "frame": Target(
        _frame,
        _frames,
        ("builtins.ValueError", "google.protobuf.message.DecodeError"),
        ("workers.links.frames", "protos.codec"),
    ),
    "shard": Target(
        _shard,
        _calls,
        (),  # a refusal is an answer
        ("ps.server", "ps.shm", "ps.shard", "ps.table", "protos.codec"),
    ),
    "region": Target(
        _region,
        _calls_by_region,
        (),  # a refusal is an answer
        ("ps.server", "ps.shm", "ps.shard", "ps.table", "protos.codec"),
    ),
    "ring": Target(_ring, _ring_messages, (), ("workers.links.ring",)),
    "replay": Target(
        _replay,
        _records,
        (
            *("builtins.ValueError", "builtins.KeyError", "google.protobuf.message.DecodeError"),
            *("ps.errors.ConflictError", "ps.errors.StaleRouteError", "ps.errors.OutdatedError"),
        ),
        ("ps.shard", "ps.table", "protos.codec"),
    ),
    "archive": Target(
        _archive,
        _archives,
        ("workers.model.code.unpack.ArchiveError",),
        ("workers.model.code.unpack",),
    ),
    "feed": Target(_feed, _feeds, _SAVE, ("ps.serving.feed",)),
    "policy": Target(_policy, _policies, ("builtins.ValueError",), ("scheduler.agent.policy",)),
}
