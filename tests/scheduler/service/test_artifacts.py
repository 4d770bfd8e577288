"""What travels with jobs: kept by content, named by job, within a limit; over real gRPC."""

import errno
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from chassis.channels import RpcError, connect
from chassis.servers import Server
from chassis.transfer import Content, TransferError, fetch, send
from protos.artifacts_pb2 import (
    GetArtifactRequest,
    HasRequest,
    ListArtifactsRequest,
    PutChunk,
    PutHeader,
    RemoveArtifactsRequest,
)
from protos.artifacts_pb2_grpc import ArtifactsStub, add_ArtifactsServicer_to_server
from protos.naming import KEPT
from ps.checkpoint.artifact_store import ArtifactStore
from scheduler.service import artifacts as module
from scheduler.service.access import Access
from scheduler.service.artifacts import ArtifactError, Artifacts, FullError, MissingError
from scheduler.service.artifacts_service import ArtifactsService
from tests.disks import small_disk

RUNNING = {"a", "b", "c"}


def is_over(job_id: str) -> bool:
    return job_id not in RUNNING


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def keep(kept: Artifacts, data: bytes, job_id: str = "", name: str = "") -> str:
    kept.receive(digest_of(data), len(data), iter([data]))
    if job_id:
        kept.name(job_id, name, digest_of(data))
    return digest_of(data)


def read(kept: Artifacts, **which: str) -> bytes:
    stream, _ = kept.open(**which)
    with stream:
        return stream.read()


def test_content_and_names_outlive_the_scheduler(tmp_path):
    kept = Artifacts(tmp_path, is_over)
    digest = keep(kept, b"weights", "a", "tables/x.rows")
    assert not kept.receive(digest, 7, iter([])), "it is here already"
    kept.name("a", "copy", digest)
    assert kept.total_bytes == 7, "the same content is kept once"
    again = Artifacts(tmp_path, is_over)
    assert read(again, job_id="a", name="tables/x.rows") == b"weights"
    assert list(again.files("a")) == ["copy", "tables/x.rows"]
    assert again.remove("a", "tables") == 1
    assert read(again, job_id="a", name="copy") == b"weights", "another name is left"
    assert again.remove("a", "copy") == 1
    assert again.remove("a", "copy") == 0, "safe to repeat"
    assert (again.total_bytes, os.listdir(tmp_path / "content")) == (0, [])
    for folder in (tmp_path / "content", tmp_path / "jobs"):
        assert not folder.stat().st_mode & 0o077, "for this user alone"


@pytest.mark.parametrize(
    ("digest", "size", "data", "said"),
    [
        (digest_of(b"one"), 3, b"two", "was changed on its way"),
        (digest_of(b"one"), 3, b"on", "2 bytes; 3 were to come"),
        (digest_of(b"one"), 3, b"one more", "over the 3 bytes"),
        ("../../etc/passwd", 3, b"one", "64 hexadecimal digits"),
        ("A" * 64, 3, b"one", "64 hexadecimal digits"),
    ],
)
def test_what_is_not_as_said_is_not_kept(tmp_path, digest, size, data, said):
    kept = Artifacts(tmp_path, is_over)
    with pytest.raises(ArtifactError, match=said):
        kept.receive(digest, size, iter([data]))
    assert kept.total_bytes == 0
    assert os.listdir(tmp_path / "incoming") == os.listdir(tmp_path / "content") == []


@pytest.mark.parametrize("name", ["", "../x", "/x", "a/../x", "a//b", ".hidden", "a b", "x" * 513])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    kept = Artifacts(tmp_path, is_over)
    digest = keep(kept, b"one")
    with pytest.raises(ArtifactError, match="name: "):
        kept.name("a", name, digest)
    with pytest.raises(ArtifactError, match="name: "):
        kept.remove("a", name)


def test_when_room_is_needed_the_job_that_ended_first_makes_it(tmp_path):
    kept = Artifacts(tmp_path, is_over, limit_bytes=1000)
    for job_id, when in (("old", 1), ("newer", 2), ("a", 0)):
        keep(kept, job_id.encode() * 50, job_id, "model.json")
        os.utime(tmp_path / "jobs" / f"{job_id}.json", (when, when))
    keep(kept, bytes(600), "b", "model.json")
    assert kept.files("old") == {}
    assert set(kept.files("newer")) == set(kept.files("a")) == {"model.json"}
    keep(kept, bytes(range(256)), "b", "more")
    assert kept.files("newer") == {}
    with pytest.raises(FullError, match="jobs that have not ended"):
        keep(kept, b"z" * 500, "b", "too much")
    with pytest.raises(FullError, match="at most 1000"):
        keep(kept, bytes(1001))
    assert set(kept.files("a")) == {"model.json"}, "of a job that runs nothing goes"
    with pytest.raises(MissingError, match="model"):
        kept.open(job_id="old", name="model.json")


def test_content_that_no_job_names_goes_after_a_while(tmp_path, monkeypatch):
    kept = Artifacts(tmp_path, is_over)
    named = keep(kept, b"named", "a", "code.tar.gz")
    waiting = keep(kept, b"its job may be on its way")
    assert kept.sweep() == 0
    monkeypatch.setattr(module, "_AWAITED_S", 0.0)
    assert kept.sweep() == 25
    assert (kept.has(named), kept.has(waiting)) == (True, False)


def test_a_new_job_of_an_old_id_has_none_of_its_files(tmp_path):
    kept = Artifacts(tmp_path, is_over)
    keep(kept, b"a model", "a", "model.safetensors")
    kept.begin("a")
    assert kept.files("a") == {}
    assert Artifacts(tmp_path, is_over).files("a") == {}, "nor after a restart"


def test_on_a_full_disk_jobs_that_ended_make_room_where_that_does(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        kept = Artifacts(disk.path, is_over)
        for job_id, size in (("old", 600_000), ("a", 100_000)):
            keep(kept, os.urandom(size), job_id, "model")
        with pytest.raises(FullError, match="the scheduler's disk has"):
            kept.require_room(1_100_000)
        assert set(kept.files("old")) == {"model"}, "without it there is no room either"
        keep(kept, os.urandom(700_000), "b", "model")
        assert kept.files("old") == {}
        assert set(kept.files("a")) == {"model"}


@contextmanager
def serving(kept: Artifacts) -> Iterator[str]:
    server = Server("scheduler")
    access = Access(server.callers, lambda job_id: None)
    files = ArtifactsService(kept, is_over, access)
    server.add(add_ArtifactsServicer_to_server, files, "heterps.v1.Artifacts")
    server.start()
    yield server.address
    server.stop(0.1)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[ArtifactsStub, Artifacts]]:
    kept = Artifacts(tmp_path / "kept", is_over, code_limit_bytes=3 << 20)
    with serving(kept) as address, connect(address) as channel:
        yield ArtifactsStub(channel), kept


def test_a_full_disk_of_the_scheduler_is_told_as_one_of_the_machines_own(tmp_path):
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "disk", 1 << 20))
        address = stack.enter_context(serving(Artifacts(disk.path, is_over)))
        store = ArtifactStore(f"{KEPT}{address}/a/tables")
        store.require_room(100_000)
        store.write("x.rows", [os.urandom(100_000)])
        for refused in (
            lambda: store.require_room(1 << 20),
            lambda: store.write("y.rows", [os.urandom(1 << 20)]),
        ):
            with pytest.raises(OSError, match=f"scheduler {address}: .* no room") as full:
                refused()
            assert full.value.errno == errno.ENOSPC
        disk.fill()
        with pytest.raises(OSError, match="job a") as full:  # its name takes some
            store.write("z.rows", [b""])
        assert full.value.errno == errno.ENOSPC
        assert store.entries() == ["x.rows"], "what could not be kept is not there"
        store.remove("x.rows")
        assert store.entries() == []


def test_what_lies_there_for_the_limit_is_told_likewise(tmp_path):
    with serving(Artifacts(tmp_path, is_over, limit_bytes=1000)) as address:
        store = ArtifactStore(f"{KEPT}{address}/a")
        with pytest.raises(OSError, match="--artifacts-limit") as full:
            store.require_room(1001)
        assert full.value.errno == errno.ENOSPC


def test_code_goes_there_and_back(service, tmp_path):
    stub, kept = service
    data = os.urandom((2 << 20) + 12345)
    content = Content.of(io.BytesIO(data))
    assert send(stub, content, what="send")
    assert not send(stub, content, what="send"), "once is enough"
    assert stub.Has(HasRequest(digest=content.digest)).here
    path = tmp_path / "got"
    request = GetArtifactRequest(digest=content.digest)
    assert fetch(stub, request, path, what="fetch", most_bytes=3 << 20) == content.digest
    assert path.read_bytes() == data
    tail = b"".join(
        chunk.data for chunk in stub.Get(GetArtifactRequest(digest=content.digest, offset=2 << 20))
    )
    assert tail == data[2 << 20 :], "a fetch that broke off goes on"
    with pytest.raises(TransferError, match="at most 1000"):
        fetch(stub, request, tmp_path / "small", what="fetch", most_bytes=1000)
    (kept._content / content.digest).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(TransferError, match="expected"):
        fetch(stub, request, tmp_path / "spoilt", what="fetch", most_bytes=3 << 20)
    assert sorted(os.listdir(tmp_path)) == ["got", "kept"], "nothing half-done is left"


def test_an_attempt_that_is_still_read_does_not_spoil_the_next():
    data = os.urandom(3 << 20)
    content = Content.of(io.BytesIO(data))
    first, second = content.chunks(), content.chunks()
    got: list[list[bytes]] = [[], []]
    for one, other in zip(first, second, strict=True):
        got[0].append(one.data)
        got[1].append(other.data)
    assert [b"".join(parts) for parts in got] == [data, data]


def test_a_fetch_that_breaks_off_goes_on(service, tmp_path):
    stub, _ = service
    data = os.urandom(3 << 20)
    content = Content.of(io.BytesIO(data))
    send(stub, content, what="send")
    offsets = []

    class Breaking:
        """A connection that is lost after every second message."""

        def Get(self, request, timeout):
            offsets.append(request.offset)
            for number, chunk in enumerate(stub.Get(request, timeout=timeout)):
                if number == 2:
                    stub_of_nobody().Has(HasRequest(), timeout=5)
                yield chunk

    request = GetArtifactRequest(digest=content.digest)
    fetch(Breaking(), request, tmp_path / "got", what="fetch", most_bytes=3 << 20)
    assert (tmp_path / "got").read_bytes() == data
    assert offsets == [0, 1 << 20, 2 << 20]


def stub_of_nobody() -> ArtifactsStub:
    return ArtifactsStub(connect("127.0.0.1:1"))


def test_a_jobs_files(service):
    stub, _ = service
    for name, data in (("tables/one", b"1"), ("tables/two", b"22"), ("model.json", b"{}")):
        send(stub, Content.of(io.BytesIO(data)), what="keep", job_id="a", name=name)
    listed = stub.List(ListArtifactsRequest(job_id="a")).files
    assert [(f.name, f.bytes) for f in listed] == [
        ("model.json", 2),
        ("tables/one", 1),
        ("tables/two", 2),
    ]
    assert stub.Remove(RemoveArtifactsRequest(job_id="a", name="tables")).removed == 2
    assert stub.Remove(RemoveArtifactsRequest(job_id="gone", name="tables")).removed == 0
    assert [f.name for f in stub.List(ListArtifactsRequest(job_id="a")).files] == ["model.json"]


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (PutHeader(digest=digest_of(b"1"), bytes=1), b"2", "changed on its way"),
        (PutHeader(digest=digest_of(b"1"), bytes=4 << 20), b"1", "--code-limit"),
        (
            PutHeader(digest=digest_of(b"1"), bytes=1, job_id="gone", name="x"),
            b"1",
            "one that runs",
        ),
        (PutHeader(digest=digest_of(b"1"), bytes=1, job_id="a", name="../x"), b"1", "name: "),
        (PutHeader(), b"", "64 hexadecimal digits"),
    ],
)
def test_refused_over_the_network(service, header, data, said):
    stub, kept = service

    class Forged(Content):
        def chunks(self, job_id: str = "", name: str = "") -> Iterator[PutChunk]:
            yield PutChunk(header=header, data=data)

    with pytest.raises(RpcError, match=said):
        send(stub, Forged(io.BytesIO(), "0" * 64, 0), what="send", retry_s=0.0)
    assert kept.total_bytes == 0


def test_what_is_not_there(service, tmp_path):
    stub, _ = service
    for request in (
        GetArtifactRequest(digest="0" * 64),
        GetArtifactRequest(digest="../jobs/a.json"),
        GetArtifactRequest(job_id="a", name="nothing"),
    ):
        with pytest.raises(RpcError, match=r"not here|no file"):
            fetch(stub, request, tmp_path / "got", what="fetch", most_bytes=10)
